"""A real local cluster, started by the command line as a user would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

MODEL = "smollm2-135m-instruct"
START_TIMEOUT_S = 120.0
_PATIENCE_S = 90.0  # only so that a broken test ends


class RunningCluster:
    """``leadout serve`` as a child process; ready when the constructor returns."""

    def __init__(self, *, prefill: int, decode: int, settings: Mapping[str, str] | None = None) -> None:
        self.url = f"http://127.0.0.1:{_free_port()}"
        # One client, and without certificates to load: it would take a core to ask so often with a new one.
        self._client = httpx.Client(
            base_url=self.url,
            timeout=5,
            trust_env=False,
            verify=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self.num_workers = prefill + decode
        self._log = tempfile.NamedTemporaryFile(prefix="leadout-test-", suffix=".log")  # noqa: SIM115
        options = [
            *("--prefill", str(prefill), "--decode", str(decode), "--port", self.url.rsplit(":", 1)[1]),
            *("--set", "engine.kv_cache_memory=256MiB", "--verbose"),
        ]
        for key, value in (settings or {}).items():
            options += ["--set", f"{key}={value}"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LEADOUT_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "leadout", "serve", *options],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        self.wait_until(lambda: self.ready_workers() == self.num_workers, START_TIMEOUT_S)

    @property
    def log(self) -> str:
        """What all processes have logged."""
        return Path(self._log.name).read_text(errors="replace")

    def workers(self) -> list[dict[str, Any]]:
        """``workers`` of ``/cluster``; empty if the router does not answer."""
        try:
            response = self._client.get("/cluster")
        except httpx.HTTPError:
            return []
        workers: list[dict[str, Any]] = response.json()["workers"]
        return workers

    def ids_of(self, role: str) -> list[str]:
        """The ids of the workers that have this role now. Ids say nothing of roles, which change."""
        return sorted(worker["id"] for worker in self.workers() if worker["role"] == role)

    def ready_workers(self) -> int:
        """How many workers take requests."""
        return sum(worker["state"] == "ready" for worker in self.workers())

    def pids(self) -> dict[str, int]:
        """The launcher's processes by name, asked of the kernel: workers, ``router-0`` and ``registry``."""
        pids = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                command = child.cmdline()
                if "--id" in command:
                    pids[command[command.index("--id") + 1]] = child.pid
                elif any("registry.sock" in argument for argument in command):
                    pids["registry"] = child.pid
        return pids

    def pid(self, name: str) -> int:
        """One of the launcher's processes. Fails if it is not there."""
        return self.pids()[name]

    def is_whole(self) -> bool:
        """Whether every process runs, and the router and the workers that run now are ready for requests."""
        pids = self.pids()
        workers = self.workers()
        return (
            {"router-0", "registry"} <= pids.keys()
            and len(workers) == self.num_workers
            and all(one["state"] == "ready" and one["pid"] == pids.get(one["id"]) for one in workers)
        )

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the router's samples of this name that have these labels."""
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        total = 0.0
        for line in self._client.get("/metrics").text.splitlines():
            sample, _, value = line.rpartition(" ")
            found, _, rest = sample.partition("{")
            if found == name and wanted <= set(rest.removesuffix("}").split(",")):
                total += float(value)
        return total

    def leaked_blocks(self) -> dict[str, dict[str, int]]:
        """Blocks that are not free on workers without requests, and why; empty if nothing is leaked."""
        leaks = {}
        for worker in self.workers():
            queue, kv = worker["load"]["queue"], worker["load"]["kv"]
            counts = {
                **{name: queue[name] for name in ("running", "waiting", "waiting_for_remote_kv")},
                **{name: kv[name] for name in ("blocks_reserved", "blocks_pinned", "blocks_quarantined")},
                "blocks_used": kv["blocks_total"] - kv["blocks_free"],
                "handoffs": sum(worker["load"]["handoffs"].values()),
            }
            counts = {name: count for name, count in counts.items() if count}
            if counts:
                leaks[worker["id"]] = counts
        return leaks

    def wait_until_idle(self, timeout_s: float = _PATIENCE_S) -> None:
        """Until all workers are there and no block is in use. Fails with what is leaked."""
        self.wait_until(
            lambda: len(self.workers()) == self.num_workers and not self.leaked_blocks(), timeout_s
        )

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = _PATIENCE_S) -> None:
        """Poll ``condition``; fails with the workers' state and the end of the log."""
        give_up_at = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > give_up_at:
                state = json.dumps(self.workers(), indent=1)
                raise AssertionError(
                    f"not so after {timeout_s} s (exit status {self.process.poll()}):\n{state}\n"
                    f"leaked: {self.leaked_blocks()}\n{self.log[-6000:]}"
                )
            time.sleep(0.05)

    def complete(self, **body: Any) -> dict[str, Any]:
        """``POST /v1/completions``, greedy unless ``body`` says otherwise; fails unless it is a 200.

        The answer says where its time went, and fails unless each token of a prompt came from one place.
        """
        response = self._client.post(
            "/v1/completions",
            json={"model": MODEL, "temperature": 0, "max_tokens": 16, **body},
            headers={"X-Leadout-Explain": "1"},
            timeout=240,
        )
        assert response.status_code == 200, f"{response.status_code}: {response.text}\n{self.log[-6000:]}"
        answer: dict[str, Any] = response.json()
        if isinstance(body["prompt"], str):
            timings = answer["leadout"]["timings"]
            places = ("num_computed_tokens", "num_prefill_cached_tokens", "num_decode_cached_tokens")
            assert sum(timings[place] for place in places) == answer["usage"]["prompt_tokens"], answer
        return answer

    def stop(self) -> int:
        """SIGTERM, as a service manager would; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self._client.close()
            self._log.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
