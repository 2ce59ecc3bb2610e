"""What other people's streams notice of a request whose body is as bad as the size limit allows.

    python -m benchmarks.hostile_bodies                              # starts a cluster of its own
    python -m benchmarks.hostile_bodies --url http://127.0.0.1:8000  # or takes one that runs
    python -m benchmarks.hostile_bodies --only words --only stop     # bodies whose name has one of these

One stream generates all the while. Printed are the longest gap between two of its events, calm and beside
each body, the longest round trip of GET /health meanwhile (the router's own part), and how each body was
answered. The status of the process is 1 if a gap exceeds the calm one by more than --allowed-ms. Nothing else
should run on the machine; with few cores, a gap also holds what the workers lose to the process that works on
the body.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from benchmarks.handoff_vs_aggregated import MODEL, free_url, wait_until_ready

MB = 1_000_000
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROBE_INTERVAL_S = 0.005
# Answered in full, with 200,000 prompt tokens: what the stream notices is the workers' load, and not judged.
LOADS = ("128 prompts of 7 kB", "128 prompts of 1,900 ids")


def chat(content: Any = "Say hi.", **fields: Any) -> tuple[str, bytes]:
    """A chat request for a short answer."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return CHAT, json.dumps({**body, **fields}).encode()


def completion(prompt: Any = "Hi", **fields: Any) -> tuple[str, bytes]:
    """A completion request for a short answer."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
    return COMPLETION, json.dumps({**body, **fields}).encode()


def nested(opening: str, closing: str, size: int) -> tuple[str, bytes]:
    """JSON that is nothing but depth."""
    depth = size // 2 // len(opening)
    text = '{"model": "m", "metadata": ' + opening * depth + "1" + closing * depth + "}"
    return CHAT, text.encode()


def bodies() -> dict[str, Callable[[], tuple[str, bytes]]]:
    """By name: route and body, each under 8 MiB."""
    message = {"role": "user", "content": "Hi"}
    part = {"type": "text", "text": "Hi"}
    stops = ["a" * 449_999 + "b"] * 16
    return {
        "7 MB without a space": lambda: completion("a" * 7 * MB),
        "7 MB of words": lambda: completion("word and " * (7 * MB // 9)),
        "7 MB without a space, chat": lambda: chat("a" * 7 * MB),
        "7 MB of words, chat": lambda: chat("word and " * (7 * MB // 9)),
        "600 kB without a space": lambda: completion("a" * 600_000),
        "600 kB of words": lambda: chat("word and " * (600_000 // 9)),
        "7 MB of spaces": lambda: chat(" " * 7 * MB),
        "7 MB of control tokens": lambda: chat("<|im_end|>" * (7 * MB // 10)),
        "600 kB of control tokens": lambda: chat("<|im_end|>" * 60_000),
        "7 MB of escapes": lambda: chat("é中" * (7 * MB // 12)),
        "150,000 messages": lambda: chat(messages=[message] * 150_000),
        "9,999 messages": lambda: chat(messages=[message] * 9_999),
        "200,000 content parts": lambda: chat([part] * 200_000),
        "19,999 content parts": lambda: chat([part] * 19_999),
        "150,000 messages of no kind": lambda: chat(messages=[{"x": 1}] * 150_000),
        "1,000 prompts of 7 kB": lambda: completion(["word and " * 777] * 1_000),
        "128 prompts of 7 kB": lambda: completion(["word and " * 777] * 128),
        "128 prompts of 1,900 ids": lambda: completion([[1000] * 1_900] * 128),
        "16 stop strings of 450 kB, n 16": lambda: chat(stop=stops, n=16),
        "a stop string of 7 MB": lambda: chat(stop="a" * 7 * MB),
        "16 stop strings of 1 kB, n 16": lambda: chat(stop=["a" * 1_023 + "b"] * 16, n=16),
        "2,000,000 token ids": lambda: completion([1] * 2 * MB),
        "100,000 lists of token ids": lambda: completion([[1] * 10] * 100_000),
        "token ids with a word in them": lambda: completion([1] * 1_500_000 + ["x"]),
        "2,000,000 empty objects": lambda: completion([{}] * 2 * MB),
        "logit_bias of 400,000": lambda: chat(logit_bias={str(i): 1 for i in range(400_000)}),
        "stop_token_ids of 2,000,000": lambda: chat(stop_token_ids=[1] * 2 * MB),
        "8 MB of numbers": lambda: chat(metadata=[1.5] * 1_500_000),
        "7 MB of tools": lambda: chat(tools=[{"type": "function", "function": {"name": "f"}}] * 120_000),
        "7 MB of chat_template_kwargs": lambda: chat(chat_template_kwargs={"x": ["y"] * MB}),
        "response_format of 7 MB": lambda: chat(response_format={"type": "text", "x": ["y"] * MB}),
        "7 MB of unknown fields": lambda: chat(**{f"field_{i}": i for i in range(300_000)}),
        "model of 7 MB": lambda: chat(model="m" * 7 * MB),
        "role of 7 MB": lambda: chat(messages=[{"role": "r" * 7 * MB, "content": "Hi"}]),
        "part type of 7 MB": lambda: chat([{"type": "t" * 7 * MB}]),
        "lists in lists": lambda: nested("[", "]", 7 * MB),
        "objects in objects": lambda: nested('{"a":', "}", 7 * MB),
        "a number of 7 MB": lambda: (CHAT, b'{"model": "m", "seed": ' + b"1" * 7 * MB + b"}"),
        "7 MB of no JSON": lambda: (CHAT, b'{"model": "' + b"\\u" * (7 * MB // 2)),
    }


class CalmStream:
    """One answer after another, and when its events came."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.arrivals: list[float] = []  # time.perf_counter()

    async def run(self) -> None:
        """Until cancelled."""
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 7_000, "ignore_eos": True, "stream": True}
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            while True:
                async with client.stream("POST", self._url + COMPLETION, json=body) as response:
                    response.raise_for_status()
                    async for line in response.aiter_lines():
                        if line.startswith("data: "):
                            self.arrivals.append(time.perf_counter())
                self.arrivals.clear()  # the pause between two answers is no gap

    def longest_gap_ms(self, since: float) -> float:
        """Of the events after ``since`` and the last before it, the one that is still open included."""
        times = [at for at in self.arrivals if at >= since]
        before = [at for at in self.arrivals if at < since][-1:]
        times = [*before, *times, time.perf_counter()]
        return max(later - earlier for earlier, later in itertools.pairwise(times)) * 1000


@contextlib.asynccontextmanager
async def probing(url: str) -> AsyncIterator[list[float]]:
    """Round trips of GET /health meanwhile, in ms."""
    round_trips: list[float] = []

    async def probe() -> None:
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            while True:
                sent_at = time.perf_counter()
                await client.get(url + "/health")
                round_trips.append((time.perf_counter() - sent_at) * 1000)
                await asyncio.sleep(PROBE_INTERVAL_S)

    task = asyncio.create_task(probe())
    try:
        yield round_trips
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def measure(url: str, options: argparse.Namespace) -> bool:
    """Print the table. Whether all gaps were allowed."""
    stream = CalmStream(url)
    running = asyncio.create_task(stream.run())
    try:
        while len(stream.arrivals) < 8 and not running.done():  # noqa: ASYNC110 - another process's progress
            await asyncio.sleep(0.05)
        async with probing(url) as round_trips:
            since = time.perf_counter()
            await asyncio.sleep(options.calm_s)
        calm = stream.longest_gap_ms(since)
        print(f"{'body':<36}{'bytes':>11}{'status':>8}{'gap ms':>10}{'health ms':>11}{'after s':>9}  answer")
        print(f"{'(calm)':<36}{'':>11}{'':>8}{calm:>10.0f}{max(round_trips):>11.0f}")
        worst = 0.0
        for name, build in bodies().items():
            if options.only and not any(part in name for part in options.only):
                continue
            path, body = build()
            await asyncio.sleep(0.5)  # what has come while the body was built is read now
            async with probing(url) as round_trips:
                since = time.perf_counter()
                status, answer = await asyncio.to_thread(post, url + path, body)
                took_s = time.perf_counter() - since
                await asyncio.sleep(0.3)
                gap = stream.longest_gap_ms(since)
            worst = worst if name in LOADS else max(worst, gap)
            print(
                f"{name:<36}{len(body):>11,}{status:>8}{gap:>10.0f}{max(round_trips, default=0):>11.0f}"
                f"{took_s:>9.2f}  {answer}",
                flush=True,
            )
            if running.done():
                running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    print(f"longest gap beside a body: {worst:.0f} ms, calm: {calm:.0f} ms")
    return worst <= calm + options.allowed_ms


def post(url: str, body: bytes) -> tuple[int, str]:
    """Status and the beginning of the answer. In a thread: sending 8 MB must not delay the measuring."""
    response = httpx.post(
        url, content=body, headers={"Content-Type": "application/json"}, timeout=300, trust_env=False
    )
    answer = response.json()
    return response.status_code, str(answer.get("error", {}).get("message", "an answer"))[:90]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--url", help="a running router; else a cluster is started")
    parser.add_argument("--only", action="append", help="part of a body's name; may be given more than once")
    parser.add_argument("--calm-s", type=float, default=10.0, help="how long the stream runs alone first, s")
    parser.add_argument("--allowed-ms", type=float, default=100.0, help="beyond the calm gap, ms")
    options = parser.parse_args()
    if options.url:
        is_good = asyncio.run(measure(options.url, options))
    else:
        url = free_url()
        command = [sys.executable, "-m", "leadout", "serve", "--port", url.rsplit(":", 1)[1]]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            wait_until_ready(url, 2)
            is_good = asyncio.run(measure(url, options))
        finally:
            server.terminate()
            server.wait()
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
