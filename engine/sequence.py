"""One request's state inside an engine, and the token that a sampler chose for it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from cluster.block_hash import BlockHash
from cluster.messages import TokenLogprobs
from cluster.sampling_params import SamplingParams
from engine.new_request import NewRequest


class SequenceStatus(enum.IntEnum):
    """Where a sequence is. Everything after PREEMPTED is finished."""

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()  # blocks reserved, a peer computes the prompt
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()  # waiting again, without blocks
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens will come."""
        return self > SequenceStatus.PREEMPTED


class SequencePhase(enum.Enum):
    """What a sequence's next step computes."""

    PREFILL = enum.auto()  # known tokens: the prompt, or after a preemption prompt and output so far
    DECODE = enum.auto()  # what was sampled last; all before it has KV


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """What the sampler made of one row of logits: a token, or an error (and then ``token_id`` is -1)."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    is_refusal: bool = False  # the error lies in the request itself: another worker would say the same


class Sequence:
    """A request with its tokens so far. Owned and changed by the scheduler only.

    ``all_token_ids[:num_computed_tokens]`` have KV in the cache; the rest is still to be computed. Tokens are
    only ever appended, so hashes of full blocks, once computed, stay valid through preemption.
    """

    __slots__ = (
        "all_token_ids",
        "arrival_index",
        "arrived_at",
        "block_hashes",
        "cache_hit_hint",
        "hash_root",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_prompt_tokens",
        "num_prompt_tokens_counted",
        "phase",
        "prefill_only",
        "remote_prefill",
        "request_id",
        "sampling",
        "status",
        "was_scheduled",
    )

    def __init__(
        self, request: NewRequest, *, arrived_at: float, arrival_index: int, hash_root: BlockHash
    ) -> None:
        self.request_id: str = request.request_id
        self.sampling: SamplingParams = request.spec.sampling
        self.all_token_ids: list[int] = [*request.spec.prompt_token_ids, *request.spec.output_token_ids]
        self.num_prompt_tokens: int = len(request.spec.prompt_token_ids)
        self.remote_prefill: bool = request.remote_prefill  # False again once that is over
        self.prefill_only: bool = request.prefill_only
        self.arrived_at = arrived_at  # seconds on the caller's clock
        self.arrival_index = arrival_index
        self.hash_root = hash_root
        self.block_hashes: list[BlockHash] = []
        self.status = SequenceStatus.WAITING
        self.phase = SequencePhase.PREFILL
        self.num_computed_tokens: int = 0
        self.num_in_flight_tokens: int = 0  # scheduled after those, in steps not yet taken in
        self.num_cached_tokens: int | None = None  # prefix hit at first schedule; None before it
        self.cache_hit_hint: int = 0  # blocks; an estimate that only orders the waiting queue
        self.num_prompt_tokens_counted: int = 0  # prompt tokens already counted as computed
        self.was_scheduled: bool = False

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, those of earlier attempts included."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens without KV."""
        return len(self.all_token_ids) - self.num_computed_tokens

    @property
    def num_unscheduled_tokens(self) -> int:
        """Known tokens without KV that no step in flight computes."""
        return self.num_uncomputed_tokens - self.num_in_flight_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.name}, computed {self.num_computed_tokens}"
            f" of {self.num_tokens} tokens)"
        )
