"""The command line. Commands import what they need when they run, so that ``--help`` is quick."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import logging
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
import yaml

from cluster.config.settings import ConfigError, LeadoutConfig, load_config
from cluster.errors import LeadoutError
from cluster.members import Role
from leadout.errors import UserError


class _Commands(typer.core.TyperGroup):
    """All commands; what goes wrong in one of them ends here."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was typed; an error that a person can put right becomes an exit status."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):  # these are RuntimeErrors
            raise
        except (LeadoutError, ValueError, OSError, RuntimeError) as error:
            if ctx.params["debug"] or logging.getLogger().isEnabledFor(logging.DEBUG):
                traceback.print_exception(error)
            if isinstance(error, LeadoutError):
                message, status = str(error), error.exit_status
            else:
                message, status = f"{type(error).__name__}: {error}", 1
            print(f"leadout: {message}", file=sys.stderr)
            raise typer.Exit(status) from None


app = typer.Typer(
    name="leadout",
    cls=_Commands,
    help="LLM serving with separate prefill and decode workers.",
    epilog="Exit status: 0 done; 1 failed, standard error says why; 2 wrong usage or configuration.",
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
Id = Annotated[str | None, typer.Option(help="The process's id in the cluster; one is made up otherwise.")]
Host = Annotated[str | None, typer.Option(help="Address to listen at.")]
Port = Annotated[int | None, typer.Option(help="Port to listen at; 0: any free one.")]
RegistryUrl = Annotated[str | None, typer.Option(help="URL of the Redis or Valkey server.")]
Url = Annotated[str, typer.Option(help="Base URL of the server.")]
ServedModel = Annotated[
    str | None, typer.Option("--model", help="Model name; the server's first one if not given.")
]
DEFAULT_URL = "http://127.0.0.1:8000"


def main() -> None:
    """Run the command line."""
    app()


@app.callback()
def _options(
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Print the traceback of an error, too, as log.level=debug does."),
    ] = False,
) -> None:
    """LLM serving with separate prefill and decode workers."""


@app.command()
def serve(
    prefill: Annotated[
        int | None, typer.Option(help="Prefill workers; 0: decode workers prefill themselves.")
    ] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    host: Host = None,
    port: Port = None,
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
    id: Id = None,  # noqa: A002
    host: Host = None,
    port: Port = None,
    registry: RegistryUrl = None,
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


@app.command()
def worker(
    role: Annotated[
        Role, typer.Option(help="What it takes when it starts; `leadout flip` changes that while it runs.")
    ] = "both",
    id: Id = None,  # noqa: A002
    registry: RegistryUrl = None,
    model: Model = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Run one worker, which computes prompts for others, generates answers, or does both."""
    gc.disable()  # what torch makes when it is imported is no garbage: looking for some takes a tenth of it
    from leadout.worker.process import run_worker

    gc.freeze()  # nor is it looked through later, between two steps
    gc.enable()
    overrides = {"registry": {"url": registry}, "model": {"source": model}}
    raise typer.Exit(run_worker(_load(config, settings, overrides), role, id))


@app.command()
def chat(
    url: Url = DEFAULT_URL,
    model: ServedModel = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
) -> None:
    """Talk to a served model in the terminal."""
    from leadout.bench.run import find_model
    from leadout.chat import run_chat

    base = _base_url(url)
    run_chat(
        base,
        model or asyncio.run(find_model(base)),
        system=system,
        temperature=temperature,
        max_tokens=max_tokens,
    )


@app.command()
def bench(
    url: Url = DEFAULT_URL,
    model: ServedModel = None,
    num_requests: Annotated[int, typer.Option(help="Requests to send.")] = 32,
    concurrency: Annotated[
        int | None, typer.Option(help="Most requests at once; no limit if not given.")
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Requests per second, Poisson; all at once if not given.")
    ] = None,
    input_len: Annotated[int, typer.Option(help="Length of a synthetic prompt, in words.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens to generate.")] = 32,
    length_spread: Annotated[float, typer.Option(help="Lengths vary by ± this share.")] = 0.0,
    shared_prefix_len: Annotated[int, typer.Option(help="Words that all prompts share.")] = 0,
    dataset: Annotated[
        Path | None, typer.Option(help='Prompts: a JSON object {"prompt", "max_tokens"} per line.')
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Generate exactly the asked number of tokens (an extension, not OpenAI's).")
    ] = False,
    warmup: Annotated[int, typer.Option(help="Requests before the measurement.")] = 2,
    goodput: Annotated[
        str | None, typer.Option(help="Limits in ms, as ttft=500,tpot=50,e2e=5000; any of them.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals.")] = 0,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure an OpenAI-compatible server: TTFT, ITL, TPOT, throughput, goodput."""
    from leadout.bench.client import Target
    from leadout.bench.run import find_model, find_number_formats, run_bench
    from leadout.bench.statistics import Goodput
    from leadout.bench.workload import WorkloadSettings, synthetic_workload, workload_from_file

    settings = WorkloadSettings(
        num_requests=num_requests,
        input_len=input_len,
        output_len=output_len,
        length_spread=length_spread,
        shared_prefix_len=shared_prefix_len,
        request_rate=request_rate,
        seed=seed,
    )
    workload = synthetic_workload(settings) if dataset is None else workload_from_file(dataset, settings)
    limits = None if goodput is None else Goodput(**_limits(goodput))
    base = _base_url(url)
    target = Target(
        url=base,
        model=model or asyncio.run(find_model(base)),
        ignore_eos=ignore_eos,
        headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
    )
    result = run_bench(
        target,
        workload,
        concurrency=concurrency,
        num_warmup=warmup,
        goodput=limits,
        as_json=as_json,
        number_formats=asyncio.run(find_number_formats(target)),
    )
    raise typer.Exit(1 if result.num_failed else 0)


@app.command()
def status(
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the router's answer as it is.")] = False,
    watch: Annotated[float | None, typer.Option(help="Refresh each so many seconds.", min=0.1)] = None,
) -> None:
    """Show what runs where, and how busy it is. Exit status 1 if nothing can be served."""
    from leadout.status import run_status

    raise typer.Exit(run_status(_base_url(url), as_json=as_json, watch_s=watch))


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="The worker's id, as `leadout status` shows it.")],
    url: Url = DEFAULT_URL,
    wait: Annotated[
        float, typer.Option(help="Follow it for at most so many seconds; 0: only give the order.", min=0)
    ] = 600.0,
    force: Annotated[
        bool, typer.Option("--force", help="Also if it is the last worker of its role.")
    ] = False,
) -> None:
    """Have a worker finish what it has and end. Exit status 1 if it has not left in time."""
    from leadout.drain import run_drain

    raise typer.Exit(run_drain(_base_url(url), worker, wait_s=wait, force=force))


@app.command()
def flip(
    worker: Annotated[str, typer.Argument(help="The worker's id, as `leadout status` shows it.")],
    role: Annotated[Role, typer.Argument(help="What it takes from now on.")],
    url: Url = DEFAULT_URL,
    wait: Annotated[
        float, typer.Option(help="Follow it for at most so many seconds; 0: only give the order.", min=0)
    ] = 600.0,
    force: Annotated[
        bool, typer.Option("--force", help="Also if nobody else takes what it gives up.")
    ] = False,
) -> None:
    """Change a worker's role without starting it anew. Exit status 1 if it has not finished in time."""
    from leadout.flip import run_flip

    raise typer.Exit(run_flip(_base_url(url), worker, role, wait_s=wait, force=force))


@app.command()
def doctor(
    url: Annotated[
        str | None, typer.Option(help="Router of a running cluster whose links are to be checked, too.")
    ] = None,
    model: Model = None,
    registry: RegistryUrl = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit status 1 for warnings, too.")] = False,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Check this machine, and how fast KV moves, before deploying. Exit status 1 if something is wrong."""
    from leadout.doctor.run import run_doctor

    loaded = _load(config, settings, {"registry": {"url": registry}, "model": {"source": model}})
    base = None if url is None else _base_url(url)
    raise typer.Exit(run_doctor(loaded, as_json=as_json, strict=strict, url=base))


@app.command()
def version() -> None:
    """Print the version."""
    print(importlib.metadata.version("leadout"))


def _base_url(url: str) -> str:
    import httpx

    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"--url {url!r}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"--url {url!r}: expected http://host:port or https://host:port")
    return url.rstrip("/").removesuffix("/v1")


def _limits(text: str) -> dict[str, float]:
    limits = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            if name not in ("ttft", "tpot", "e2e"):
                raise ValueError
            limits[f"{name}_ms"] = float(value)
        except ValueError:
            raise UserError(
                f"--goodput {text!r}: expected ttft=, tpot= or e2e= with ms, like ttft=500,tpot=50"
            ) from None
    return limits


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
