"""The command line. Commands import what they need when they run, so that ``--help`` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from cluster.config import ConfigError, LeadoutConfig, load_config
from leadout.errors import UserError

app = typer.Typer(
    name="leadout",
    help="LLM serving with separate prefill and decode workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file; see docs/configuration.md.", exists=True, dir_okay=False),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any setting, as section.field=value. Repeatable; wins over everything else."),
]
Model = Annotated[
    str | None, typer.Option(help="A bundled model's name, a .gguf file, a folder, or a Hugging Face id.")
]
Url = Annotated[str, typer.Option(help="Base URL of the server.")]
DEFAULT_URL = "http://127.0.0.1:8000"


def main() -> None:
    """Run the command line; expected errors become one line and exit status 2 (usage) or 1."""
    try:
        app()
    except ConfigError as error:
        _fail(str(error), 2)
    except (UserError, ValueError, OSError, RuntimeError) as error:
        if "--debug" in sys.argv:
            raise
        _fail(f"{type(error).__name__}: {error}", 1)


@app.command()
def serve(
    prefill: Annotated[
        int | None, typer.Option(help="Prefill workers; 0: decode workers prefill themselves.")
    ] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen at.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen at; 0: any free one.")] = None,
    model: Model = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the whole log of all processes.")] = False,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Serve a model on this machine: a router, prefill workers and decode workers."""
    from leadout.serve import run_serve

    loaded = _load(
        config,
        settings,
        {
            "local": {"prefill": prefill, "decode": decode},
            "router": {"host": host, "port": port},
            "model": {"source": model},
        },
    )
    raise typer.Exit(run_serve(loaded, verbose=verbose))


@app.command()
def router(
    id: Annotated[str | None, typer.Option(help="The router's id in the cluster.")] = None,  # noqa: A002
    host: Annotated[str | None, typer.Option(help="Address to listen at.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen at; 0: any free one.")] = None,
    registry: Annotated[str | None, typer.Option(help="URL of the Redis or Valkey server.")] = None,
    model: Model = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Run one router."""
    from router.process import run_router

    overrides = {
        "router": {"host": host, "port": port},
        "registry": {"url": registry},
        "model": {"source": model},
    }
    raise typer.Exit(run_router(_load(config, settings, overrides), id))


@app.command("prefill-worker")
def prefill_worker(
    id: Annotated[str | None, typer.Option(help="The worker's id in the cluster.")] = None,  # noqa: A002
    registry: Annotated[str | None, typer.Option(help="URL of the Redis or Valkey server.")] = None,
    model: Model = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Run one prefill worker."""
    from leadout.worker_process import run_worker

    overrides = {"registry": {"url": registry}, "model": {"source": model}}
    raise typer.Exit(run_worker(_load(config, settings, overrides), "prefill", id))


@app.command("decode-worker")
def decode_worker(
    id: Annotated[str | None, typer.Option(help="The worker's id in the cluster.")] = None,  # noqa: A002
    registry: Annotated[str | None, typer.Option(help="URL of the Redis or Valkey server.")] = None,
    model: Model = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Run one decode worker."""
    from leadout.worker_process import run_worker

    overrides = {"registry": {"url": registry}, "model": {"source": model}}
    raise typer.Exit(run_worker(_load(config, settings, overrides), "decode", id))


def _load(file: Path | None, settings: list[str] | None, overrides: dict[str, Any]) -> LeadoutConfig:
    for setting in settings or []:
        path, equals, value = setting.partition("=")
        section, dot, field = path.strip().partition(".")
        if not equals or not dot or not field:
            raise ConfigError(f"--set {setting!r}: expected section.field=value, like engine.block_size=32")
        try:
            overrides.setdefault(section, {})[field] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {setting!r}: the value is no YAML: {error}") from None
    return load_config(file=file, overrides=overrides)


def _fail(message: str, status: int) -> None:
    print(f"leadout: {message}", file=sys.stderr)
    raise SystemExit(status)
