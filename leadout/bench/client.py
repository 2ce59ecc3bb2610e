"""Sends one request and notes when each piece of its answer came."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from leadout.bench.workload import BenchRequest

_EXPLAIN = {"X-Leadout-Explain": "1"}  # has Leadout say where the time went; others do not know it


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What happened to one request. Times are seconds on the client's clock."""

    sent_at: float
    token_times: list[float] = field(default_factory=list)  # arrival of each chunk with text
    ended_at: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0  # as the server counts; chunks with text if it does not say
    cached_tokens: int = 0
    server_timings: dict[str, Any] | None = None  # Leadout's own account of the time to first token
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server and what is asked of it."""

    url: str  # up to and without /v1
    model: str
    ignore_eos: bool = False
    temperature: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)


async def send(
    client: httpx.AsyncClient,
    target: Target,
    request: BenchRequest,
    clock: Callable[[], float] = time.perf_counter,
) -> RequestRecord:
    """Stream one completion. Never raises for what the server does: the record has the error."""
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    record = RequestRecord(sent_at=clock())
    try:
        async with client.stream(
            "POST", f"{target.url}/v1/completions", json=body, headers={**_EXPLAIN, **target.headers}
        ) as response:
            if response.status_code != 200:
                await response.aread()
                record.error = f"HTTP {response.status_code}"
            else:
                await _read(response, record, clock)
    except (httpx.HTTPError, ValueError) as error:
        record.error = type(error).__name__
    record.ended_at = record.token_times[-1] if record.token_times else clock()
    if not record.error and not record.token_times:
        record.error = "empty answer"
    if not record.completion_tokens:
        record.completion_tokens = len(record.token_times)
    return record


async def _read(response: httpx.Response, record: RequestRecord, clock: Callable[[], float]) -> None:
    is_complete = False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            is_complete = True
            continue
        chunk = json.loads(data)
        if not isinstance(chunk, dict):
            raise ValueError(f"expected a JSON object, got {data[:80]!r}")
        error = chunk.get("error")
        if error:
            code = error.get("code") if isinstance(error, dict) else None
            record.error = str(code or "error in stream")
            return
        choices = chunk.get("choices") or []
        if any(choice.get("text") for choice in choices):
            record.token_times.append(clock())
        record.server_timings = (chunk.get("leadout") or {}).get("timings") or record.server_timings
        usage = chunk.get("usage")
        if usage:
            record.prompt_tokens = usage.get("prompt_tokens") or 0
            record.completion_tokens = usage.get("completion_tokens") or 0
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not is_complete:
        record.error = "stream cut off"
