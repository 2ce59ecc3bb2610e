"""What is sent: synthetic prompts of given lengths, or the prompts of a file."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from leadout.errors import UserError

# Short, common English words: one token each in most vocabularies.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city community name"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One request to send."""

    prompt: str
    max_tokens: int
    at_s: float = 0.0  # when to send it, after the start; used with a request rate


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    """How to make a workload. Lengths are in words for synthetic prompts, and in tokens for outputs."""

    num_requests: int
    input_len: int
    output_len: int
    length_spread: float = 0.0  # lengths are uniform in ±spread × length
    shared_prefix_len: int = 0  # words that all prompts begin with
    request_rate: float | None = None  # requests per second, Poisson; None: as fast as concurrency allows
    seed: int = 0


def synthetic_workload(settings: WorkloadSettings) -> list[BenchRequest]:
    """Random words, the same for the same seed. Raises UserError for impossible numbers."""
    if settings.num_requests < 1 or settings.input_len < 1 or settings.output_len < 1:
        raise UserError("the number of requests and the input and output lengths must be at least 1")
    if not 0 <= settings.length_spread < 1:
        raise UserError(f"the length spread is {settings.length_spread}, must be from 0 to below 1")
    if settings.shared_prefix_len >= settings.input_len:
        raise UserError(
            f"the shared prefix ({settings.shared_prefix_len} words) must be shorter than the input "
            f"({settings.input_len} words)"
        )
    rng = random.Random(settings.seed)
    prefix = rng.choices(_WORDS, k=settings.shared_prefix_len)
    requests = []
    for at_s in _arrivals(settings.num_requests, settings.request_rate, rng):
        length = _spread(settings.input_len, settings.length_spread, rng)
        words = prefix + rng.choices(_WORDS, k=max(1, length - len(prefix)))
        requests.append(
            BenchRequest(
                prompt=" ".join(words),
                max_tokens=_spread(settings.output_len, settings.length_spread, rng),
                at_s=at_s,
            )
        )
    return requests


def workload_from_file(path: Path, settings: WorkloadSettings) -> list[BenchRequest]:
    """One JSON object per line: ``{"prompt": "…", "max_tokens": 64}``; ``max_tokens`` may be missing.

    The first ``num_requests`` lines that are not blank are taken. Raises UserError that names the line.
    """
    if settings.num_requests < 1:
        raise UserError(f"the number of requests is {settings.num_requests}, must be at least 1")
    requests = []
    rng = random.Random(settings.seed)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    # Not splitlines(), which also splits at characters that JSON allows within a text.
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    lines = numbered[: settings.num_requests]
    arrivals = _arrivals(len(lines), settings.request_rate, rng)
    for (number, line), at_s in zip(lines, arrivals, strict=True):
        try:
            entry = json.loads(line)
            prompt, max_tokens = entry["prompt"], entry.get("max_tokens", settings.output_len)
        except (ValueError, KeyError, TypeError, AttributeError):
            prompt, max_tokens = None, None
        # type() is: True and False are no numbers here.
        if not isinstance(prompt, str) or type(max_tokens) is not int or max_tokens < 1:
            raise UserError(
                f'{path}, line {number}: expected {{"prompt": text, "max_tokens": number}}, got {line[:80]!r}'
            )
        requests.append(BenchRequest(prompt=prompt, max_tokens=max_tokens, at_s=at_s))
    if not requests:
        raise UserError(f"{path} holds no prompts")
    return requests


def _arrivals(count: int, rate: float | None, rng: random.Random) -> list[float]:
    if rate is None:
        return [0.0] * count
    if rate <= 0:
        raise UserError(f"the request rate is {rate}, must be above 0")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def _spread(length: int, spread: float, rng: random.Random) -> int:
    return max(1, round(length * rng.uniform(1 - spread, 1 + spread)))
