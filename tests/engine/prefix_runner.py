"""A tiny real model: its KV cache stores token ids, and its logits are a hash of the whole gathered prefix.

A wrong block table, a stale or prematurely reused block, or a skipped position changes the logits, and with
them the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from cluster.block_hash import root_hash
from cluster.sampling_params import SamplingParams
from engine.batch import Batch
from engine.engine import Engine, LaunchedStep
from engine.new_request import NewRequest
from engine.step_result import SequenceOutput, StepResult
from tests.engine.scheduler_config import SCHEDULER_CONFIG
from tests.sequence_specs import with_spec

VOCAB_SIZE = 23
EOS = 22
_MODULUS = 2_147_483_647


class PrefixRunner:
    """Writes and reads a KV tensor [num_blocks, block_size] of token ids through block tables."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.kv = torch.full((num_blocks, block_size), -1, dtype=torch.int64)
        self.fail_next = False
        self.nan_for: set[str] = set()
        self.batches: list[Batch] = []

    def write(self, block_ids: Sequence[int], start: int, token_ids: Sequence[int]) -> None:
        """Writes KV of consecutive positions, as the model does, or a peer."""
        block_size = self.kv.shape[1]
        positions = torch.arange(start, start + len(token_ids))
        table = torch.tensor(block_ids)
        self.kv[table[positions // block_size], positions % block_size] = torch.tensor(token_ids)

    def forward(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("device lost")
        rows = []
        for sequence in batch.sequences:
            end = sequence.start + len(sequence.token_ids)
            assert 0 not in sequence.block_ids, "the null block was allocated"
            self.write(sequence.block_ids, sequence.start, sequence.token_ids)
            prefix = self.kv[torch.tensor(sequence.block_ids)].flatten()
            for position in range(end - sequence.num_logits, end):
                row = prefix_logits(prefix[: position + 1])
                rows.append(row * torch.nan if sequence.request_id in self.nan_for else row)
        return torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)


def prefix_logits(prefix: torch.Tensor) -> torch.Tensor:
    """fp32 logits [vocab] after the tokens ``prefix`` [num_tokens]."""
    state = 17
    for token_id in prefix.tolist():
        state = (state * 1_000_003 + token_id + 2) % _MODULUS
    ids = torch.arange(VOCAB_SIZE, dtype=torch.int64)
    mixed = (ids * 7_368_787 + state) * 48_271 % _MODULUS
    mixed = (mixed ^ (mixed >> 13)) * 69_621 % _MODULUS
    return mixed.double().div(_MODULUS / 6).float()


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 128,
    runner: PrefixRunner | None = None,
    prefix_caching: bool = True,
    **config: Any,
) -> tuple[Engine, PrefixRunner]:
    """An engine over a new ``PrefixRunner``; ``config`` are fields of SchedulerConfig."""
    runner = runner or PrefixRunner(num_blocks, block_size)
    settings: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 8, **config}
    engine = Engine(
        runner,
        scheduler_config=replace(SCHEDULER_CONFIG, **settings),
        num_blocks=num_blocks,
        block_size=block_size,
        eos_token_ids=(EOS,),
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        hash_root=partial(root_hash, "prefix-model", block_size),
        prefix_caching=prefix_caching,
    )
    return engine, runner


def greedy(max_tokens: int = 8, **params: object) -> SamplingParams:
    """Greedy sampling."""
    return SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, **params)  # type: ignore[arg-type]


def new_request(
    request_id: str, prompt: Sequence[int], sampling: SamplingParams | None = None, **options: object
) -> NewRequest:
    """A request; greedy with 8 tokens unless told otherwise."""
    fields = {"prompt_token_ids": list(prompt), "sampling": sampling or greedy(), **options}
    return NewRequest(request_id=request_id, **with_spec(fields))


class Collector:
    """Steps an engine on a clock of its own, checks invariants, and gathers what comes out."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now = 0.0
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, SequenceOutput] = {}
        self.results: list[StepResult] = []
        self.cached = set(engine.cached_block_hashes())  # the prefix cache as its events tell it
        self.in_flight: deque[LaunchedStep] = deque()

    def launch(self) -> None:
        self.in_flight.append(self.engine.launch(self.now))
        self.now += 0.01

    def step(self) -> StepResult:
        """Takes in the oldest step in flight, a new one if there is none."""
        if not self.in_flight:
            self.launch()
        result = self.engine.collect(self.in_flight.popleft())
        self.results.append(result)
        for output in result.outputs:
            assert output.request_id not in self.finished, "output after the end"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.finished[output.request_id] = output
        assert not set(result.blocks_stored) & self.cached, "a hash was stored twice"
        assert set(result.blocks_removed) <= self.cached, "a hash was removed that was not stored"
        self.cached = self.cached - set(result.blocks_removed) | set(result.blocks_stored)
        assert self.cached == set(self.engine.cached_block_hashes())
        self.engine.check_invariants()
        return result

    def run(self, max_steps: int = 2000, *, ahead: int = 0) -> None:
        """Steps until there is no work, launching ``ahead`` steps before each; fails after ``max_steps``."""
        for _ in range(max_steps):
            if not self.engine.has_work() and not self.in_flight:
                return
            while self.engine.has_work() and len(self.in_flight) < ahead:
                self.launch()
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps: {self.engine.load()}")


def oracle(prompt: Sequence[int], sampling: SamplingParams, output: Sequence[int] = ()) -> list[int]:
    """The tokens of one request that runs alone, in one chunk, in a large pool."""
    engine, _ = make_engine(num_blocks=256, max_num_batched_tokens=512)
    engine.add_request(new_request("alone", prompt, sampling, output_token_ids=list(output)), 0.0)
    collector = Collector(engine)
    collector.run()
    return collector.tokens["alone"]


def chunk_lengths(runner: PrefixRunner, request_id: str) -> list[int]:
    """How many tokens of a request each step computed."""
    return [
        len(sequence.token_ids)
        for batch in runner.batches
        for sequence in batch.sequences
        if sequence.request_id == request_id
    ]


def consecutive(numbers: Sequence[int]) -> bool:
    """Whether each number is its predecessor plus one."""
    return all(after == before + 1 for before, after in pairwise(numbers))
