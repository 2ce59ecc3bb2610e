"""From the command line to the configuration, and from errors to one line."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import leadout.bench.run
import leadout.chat
import leadout.drain
import leadout.serve
import leadout.status
import leadout.worker.process
import router.process
from cluster.config.settings import ConfigError, LeadoutConfig
from cluster.registry import RegistryUnavailableError, StaleIncarnationError
from cluster.rpc import RpcError
from kv_transfer.transport import TransferError
from leadout.cli import app
from leadout.errors import UserError
from tests.leadout.http_server import Answer, Request, as_json, event_stream, scripted_server


@pytest.fixture(autouse=True)
def _no_configuration_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LEADOUT_") or name == "OPENAI_API_KEY":
            monkeypatch.delenv(name)


class _Calls:
    """Stands for what a command runs; keeps the arguments."""

    def __init__(self, status: int = 0) -> None:
        self.arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._status = status

    def __call__(self, *arguments: Any, **options: Any) -> int:
        self.arguments.append((arguments, options))
        return self._status

    @property
    def config(self) -> LeadoutConfig:
        ((arguments, _options),) = self.arguments
        assert isinstance(arguments[0], LeadoutConfig)
        return arguments[0]


def _invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> _Calls:
    calls = _Calls()
    monkeypatch.setattr(leadout.serve, "run_serve", calls)
    return calls


def test_serve_without_options_has_the_defaults(serve: _Calls) -> None:
    assert _invoke("serve").exit_code == 0
    assert serve.config == LeadoutConfig()
    assert serve.arguments[0][1] == {"verbose": False}


def test_serve_s_options_are_settings(serve: _Calls) -> None:
    result = _invoke(
        *("serve", "--prefill", "0", "--decode", "3", "--host", "0.0.0.0", "--port", "0"),
        *("--model", "some/model", "--verbose"),
    )
    assert result.exit_code == 0
    config = serve.config
    assert (config.local.prefill, config.local.decode) == (0, 3)
    assert (config.router.host, config.router.port) == ("0.0.0.0", 0)
    assert config.model.source == "some/model"
    assert serve.arguments[0][1] == {"verbose": True}


def test_any_setting_can_be_set(serve: _Calls) -> None:
    settings = [
        "engine.block_size=32",
        "engine.prefix_caching=false",
        "kv_transfer.backends=[UCX, POSIX]",
        "kv_transfer.verify=off",
        "model.max_model_len=null",
        "model.source=a=b",
    ]
    assert _invoke("serve", *(word for setting in settings for word in ("--set", setting))).exit_code == 0
    config = serve.config
    assert (config.engine.block_size, config.engine.prefix_caching) == (32, False)
    assert config.kv_transfer.backends == ["UCX", "POSIX"]
    assert config.kv_transfer.verify == "off"  # which is a boolean in YAML
    assert config.model.max_model_len is None
    assert config.model.source == "a=b"


def test_set_wins_over_options_environment_and_file(
    serve: _Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "leadout.yaml"
    file.write_text(
        "local: {prefill: 2, decode: 2}\nrouter: {port: 1000, host: '::1'}\nlog: {level: error}\n"
    )
    monkeypatch.setenv("LEADOUT_LOCAL__DECODE", "3")
    monkeypatch.setenv("LEADOUT_ROUTER__PORT", "2000")
    result = _invoke(
        "serve", "--config", str(file), "--port", "3000", "--decode", "4", "--set", "local.decode=5"
    )
    assert result.exit_code == 0
    config = serve.config
    assert (config.local.prefill, config.local.decode) == (2, 5)
    assert (config.router.port, config.router.host) == (3000, "::1")
    assert config.log.level == "error"


@pytest.mark.parametrize("setting", ["block_size=32", "engine.block_size", "engine.=1", "=", ""])
def test_a_malformed_setting_is_quoted(serve: _Calls, setting: str) -> None:
    result = _invoke("serve", "--set", setting)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"leadout: --set {setting!r}: expected section.field=value")
    assert serve.arguments == []


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("engine.block_size=[1", ["engine.block_size=[1", "no YAML"]),
        ("engine.blocksize=32", ["engine.blocksize"]),
        ("motor.block_size=32", ["motor"]),
        ("engine.block_size.more=32", ["block_size.more"]),
        ("engine.block_size=33", ["engine.block_size", "33"]),
        ("engine.max_num_seqs=yes", ["engine.max_num_seqs", "True"]),
    ],
)
def test_a_wrong_setting_is_named(serve: _Calls, setting: str, parts: Sequence[str]) -> None:
    result = _invoke("serve", "--set", setting)
    assert result.exit_code == 2
    assert all(part in result.stderr for part in parts)
    assert serve.arguments == []


@pytest.mark.parametrize(
    ("command", "module", "name", "rest"),
    [
        (["router"], router.process, "run_router", ["the-id"]),
        (["worker"], leadout.worker.process, "run_worker", ["both", "the-id"]),
        (["worker", "--role", "prefill"], leadout.worker.process, "run_worker", ["prefill", "the-id"]),
        (["worker", "--role", "decode"], leadout.worker.process, "run_worker", ["decode", "the-id"]),
    ],
)
def test_single_processes(
    monkeypatch: pytest.MonkeyPatch, command: list[str], module: Any, name: str, rest: list[str]
) -> None:
    calls = _Calls(status=7)
    monkeypatch.setattr(module, name, calls)
    result = _invoke(*command, "--id", "the-id", "--registry", "redis://elsewhere:1/0", "--model", "m")
    assert result.exit_code == 7  # what the process returns
    assert calls.config.registry.url == "redis://elsewhere:1/0"
    assert calls.config.model.source == "m"
    assert list(calls.arguments[0][0][1:]) == rest


def test_a_worker_has_one_of_three_roles() -> None:
    result = _invoke("worker", "--role", "router")
    assert result.exit_code == 2
    assert all(role in result.stderr for role in ("'router'", "'prefill'", "'decode'", "'both'"))


def test_chat_s_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _Calls()
    monkeypatch.setattr(leadout.chat, "run_chat", calls)
    with scripted_server(lambda _request: as_json({"data": [{"id": "found"}]})) as server:
        assert _invoke("chat", "--url", f"{server.url}/v1/", "--max-tokens", "5").exit_code == 0
        assert _invoke("chat", "--url", server.url, "--model", "given", "--system", "s").exit_code == 0
    none = {"system": None, "temperature": None, "max_tokens": None}
    assert calls.arguments == [
        ((server.url, "found"), {**none, "max_tokens": 5}),
        ((server.url, "given"), {**none, "system": "s"}),
    ]
    assert [request.path for request in server.requests] == ["/v1/models"]


def test_drain_s_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _Calls(status=1)
    monkeypatch.setattr(leadout.drain, "run_drain", calls)
    assert _invoke("drain", "worker-0", "--url", "http://host:1/", "--wait", "5").exit_code == 1
    assert calls.arguments == [(("http://host:1", "worker-0"), {"wait_s": 5.0, "force": False})]
    assert _invoke("drain", "worker-0", "--force").exit_code == 1
    assert calls.arguments[-1][1]["force"] is True
    assert _invoke("drain").exit_code == 2
    assert _invoke("drain", "worker-0", "--wait", "-1").exit_code == 2


def test_status_s_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _Calls(status=1)
    monkeypatch.setattr(leadout.status, "run_status", calls)
    assert _invoke("status", "--url", "http://host:1/v1", "--watch", "2").exit_code == 1
    assert calls.arguments == [(("http://host:1",), {"as_json": False, "watch_s": 2.0})]
    assert _invoke("status", "--watch", "0").exit_code == 2


def _one_token(request: Request) -> Answer:
    if request.path == "/v1/models":
        return as_json({"data": [{"id": "found"}]})
    if request.body["max_tokens"] == 13:
        return as_json({}, status=500)
    return event_stream({"choices": [{"text": "x"}]})


def test_bench_s_options() -> None:
    with scripted_server(_one_token) as server:
        result = _invoke(
            *("bench", "--url", server.url, "--num-requests", "3", "--input-len", "6", "--output-len", "4"),
            *("--shared-prefix-len", "2", "--warmup", "1", "--api-key", "secret"),
            *("--goodput", "ttft=60000,e2e=60000", "--concurrency", "1", "--json"),
        )
    assert result.exit_code == 0
    assert '"num_requests": 3' in result.stdout
    assert '"good_requests_per_s": null' not in result.stdout
    bodies = server.bodies()
    assert len(bodies) == 4  # with the warm-up
    assert {body["max_tokens"] for body in bodies} == {4}
    assert {body["model"] for body in bodies} == {"found"}
    assert not any("ignore_eos" in body for body in bodies)
    assert {len(body["prompt"].split()) for body in bodies[1:]} == {6}
    assert len({tuple(body["prompt"].split()[:2]) for body in bodies[1:]}) == 1
    assert {request.headers.get("authorization") for request in server.requests[1:]} == {"Bearer secret"}


def test_bench_with_a_file_fails_if_a_request_failed(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 1}\n{"prompt": "b", "max_tokens": 13}\n')
    with scripted_server(_one_token) as server:
        result = _invoke(
            "bench",
            "--url",
            server.url,
            "--model",
            "m",
            "--dataset",
            str(file),
            "--warmup",
            "0",
            "--ignore-eos",
        )
    assert result.exit_code == 1
    assert "2 requests, 1 failed" in result.stdout
    assert {body["prompt"]: body["ignore_eos"] for body in server.bodies()} == {"a": True, "b": True}


@pytest.mark.parametrize("goodput", ["ttft", "ttft=", "ttft=fast", "itl=5", "ttft=1,,tpot=2", ""])
def test_malformed_limits_are_quoted(goodput: str) -> None:
    result = _invoke("bench", "--model", "m", "--goodput", goodput)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"leadout: --goodput {goodput!r}: expected ttft=")


@pytest.mark.parametrize("command", ["bench", "chat", "status"])
@pytest.mark.parametrize("url", ["http://host:port", "host:8000", "http://", "ftp://host", "127.0.0.1"])
def test_a_malformed_url_is_quoted(command: str, url: str) -> None:
    result = _invoke(command, "--url", url)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"leadout: --url {url!r}: ")


def _raising(error: Exception) -> Callable[..., int]:
    def fail(*_arguments: Any, **_options: Any) -> int:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ConfigError("engine.block_size is wrong"), 2, "engine.block_size is wrong"),
        (UserError("the port is in use"), 1, "the port is in use"),
        (RpcError("cannot listen at tcp://[::1]:1"), 1, "cannot listen at tcp://[::1]:1"),
        (RegistryUnavailableError("no answer"), 1, "no answer"),
        (StaleIncarnationError("replaced"), 1, "replaced"),
        (TransferError("the peer is gone"), 1, "the peer is gone"),
        (RuntimeError("no device"), 1, "RuntimeError: no device"),
        (FileNotFoundError(2, "No such file", "x"), 1, "FileNotFoundError: [Errno 2] No such file: 'x'"),
    ],
)
def test_an_error_that_a_person_can_put_right_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, line: str
) -> None:
    monkeypatch.setattr(leadout.serve, "run_serve", _raising(error))
    result = _invoke("serve")
    assert (result.exit_code, result.stderr) == (status, f"leadout: {line}\n")
    shown = _invoke("--debug", "serve").stderr
    assert shown.startswith("Traceback")
    assert shown.endswith(f"leadout: {line}\n")


def test_an_error_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadout.serve, "run_serve", _raising(AssertionError("cannot be")))
    assert isinstance(_invoke("serve").exception, AssertionError)


def test_an_unknown_option_is_a_usage_error() -> None:
    result = _invoke("serve", "--prefil", "1")
    assert result.exit_code == 2
    assert "--prefil" in result.stderr


def test_the_version() -> None:
    result = _invoke("version")
    assert (result.exit_code, result.stdout.strip()) == (0, importlib.metadata.version("leadout"))


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["worker", "--help"], ["version"]])
def test_help_loads_neither_the_engine_nor_the_servers(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from leadout.cli import main\n"
        "try:\n    main()\n"
        "finally:\n"
        "    heavy = {'torch', 'engine', 'kv_transfer', 'router', 'fastapi', 'httpx', 'redis', 'numpy'}\n"
        "    print('LOADED', sorted(heavy & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert result.stdout.splitlines()[-1] == "LOADED []"
    assert len(result.stdout.splitlines()) > 1
