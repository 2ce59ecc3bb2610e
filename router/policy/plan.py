"""What a routing policy is asked and what it decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.state.cluster_state import ClusterState
from router.state.prompt_hashes import PromptHashes


@dataclass(frozen=True, kw_only=True)
class RequestSnapshot:
    """What the policy may know about the request."""

    model: str
    hashes: PromptHashes
    num_tokens: int  # of the prompt and of what earlier attempts generated: their KV comes first
    excluded_workers: frozenset[str] = frozenset()  # workers that already failed it
    num_failed_prefills: int = 0  # prefill workers that did not bring it to its end
    is_explained: bool = False  # whether the plan shall list its candidates


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One row of the decision's table."""

    worker: str
    role: str
    eligible: bool
    reason: str  # why it was passed over; "" if it was eligible
    cached_tokens: int
    num_requests: int
    num_outstanding_prefill_tokens: int
    kv_blocks_free: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who serves a request. ``prefill_worker`` None means that the decode worker prefills locally."""

    decode_worker: str
    prefill_worker: str | None
    reason: str
    cached_tokens: int  # on the chosen decode worker
    uncached_tokens: int  # to be computed by whoever prefills
    candidates: tuple[Candidate, ...] = field(default=(), repr=False)  # where they were asked for

    @property
    def decision(self) -> str:
        """``local`` or ``remote``: where the prompt is computed."""
        return "local" if self.prefill_worker is None else "remote"

    def explain(self, max_candidates: int = 8) -> dict[str, Any]:
        """The plan as a small JSON-ready mapping, with the eligible candidates first."""
        rows = sorted(self.candidates, key=lambda row: not row.eligible)[:max_candidates]
        return {
            "decode_worker": self.decode_worker,
            "prefill_worker": self.prefill_worker,
            "decision": self.decision,
            "reason": self.reason,
            "cached_tokens": self.cached_tokens,
            "uncached_tokens": self.uncached_tokens,
            "num_candidates": len(self.candidates),
            "candidates": [
                {
                    "worker": row.worker,
                    "role": row.role,
                    "cached_tokens": row.cached_tokens,
                    "requests": row.num_requests,
                    "prefill_tokens": row.num_outstanding_prefill_tokens,
                    "kv_blocks_free": row.kv_blocks_free,
                    "passed_over": row.reason,
                }
                for row in rows
            ],
        }


class NoWorkerError(Exception):
    """No worker can take the request now. ``reasons`` says of the first few why they were passed over."""

    def __init__(self, reasons: Sequence[str], num_workers: int) -> None:
        self.reasons = tuple(reasons)
        detail = "; ".join(reasons) if reasons else "no decode worker is registered"
        more = f"; and {num_workers - len(reasons)} more" if num_workers > len(reasons) else ""
        super().__init__(f"No decode worker can take this request: {detail}{more}")


class Policy(Protocol):
    """A rule that decides who serves a request. It changes nothing, and keeps nothing between calls."""

    def plan(self, state: ClusterState, request: RequestSnapshot, now: float) -> Plan:
        """Decide about one request at ``now`` (unix seconds). Raises NoWorkerError."""
        ...
