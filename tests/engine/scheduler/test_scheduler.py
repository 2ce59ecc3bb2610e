"""What a scheduler makes of a step that computed more than one new token of a sequence."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from cluster.block_hash import hash_blocks, root_hash
from engine.batch import Batch
from engine.kv_cache.kv_cache_manager import KvCacheManager
from engine.scheduler.output import SchedulerOutput, SchedulerUpdate
from engine.scheduler.scheduler import Scheduler
from engine.sequence import SampledToken, SequencePhase
from tests.engine.prefix_runner import EOS, new_request
from tests.engine.scheduler_config import SCHEDULER_CONFIG

BLOCK_SIZE = 4
ROOT = root_hash("model", BLOCK_SIZE)
PROMPT = [3, 1, 4, 1, 5]


def make_scheduler(**config: int) -> Scheduler:
    settings = replace(SCHEDULER_CONFIG, **{"max_num_batched_tokens": 16, "max_num_seqs": 8, **config})  # type: ignore[arg-type]
    kv_cache = KvCacheManager(20, BLOCK_SIZE, partial(root_hash, "model", BLOCK_SIZE), prefix_caching=True)
    return Scheduler(settings, kv_cache, eos_token_ids=frozenset({EOS}), max_model_len=64)


def sampled(*token_ids: int) -> list[SampledToken]:
    return [SampledToken(token_id=token_id) for token_id in token_ids]


def with_drafts(output: SchedulerOutput, *token_ids: int) -> SchedulerOutput:
    """The step as if it had also computed these tokens, guessed for the one sequence of its batch."""
    (part,) = output.batch.sequences
    part = replace(part, token_ids=(*part.token_ids, *token_ids), num_logits=part.num_logits + len(token_ids))
    output.sequences[0].num_in_flight_tokens += len(token_ids)
    return replace(output, batch=Batch((part,)))


@pytest.fixture
def decoding() -> Scheduler:
    """Runs one sequence, "a", with the prompt and one output token, 9."""
    scheduler = make_scheduler()
    scheduler.add_request(new_request("a", PROMPT), 0.0)
    scheduler.update_from_output(scheduler.schedule(0.0), [sampled(9)])
    return scheduler


def decode(scheduler: Scheduler, drafts: list[int], tokens: list[int]) -> SchedulerUpdate:
    output = with_drafts(scheduler.schedule(0.1), *drafts)
    update = scheduler.update_from_output(output, [sampled(*tokens)])
    scheduler.check_invariants()
    return update


def test_accepted_drafts_are_output_and_their_blocks_cached(decoding: Scheduler) -> None:
    (output,) = decode(decoding, [2, 6], [2, 6, 5]).outputs
    assert output.token_ids == (2, 6, 5)
    sequence = decoding.get("a")
    assert sequence is not None
    assert (sequence.num_computed_tokens, sequence.num_tokens) == (8, 9)
    assert decoding.generation_tokens_total == 4
    known = hash_blocks([*PROMPT, 9, 2, 6], BLOCK_SIZE, ROOT)
    assert sorted(decoding.kv_cache.snapshot()) == sorted(known)


def test_rejected_drafts_are_neither_output_nor_cached(decoding: Scheduler) -> None:
    """The second block is full of computed tokens, two of which the sequence does not have."""
    (output,) = decode(decoding, [2, 6], [7]).outputs
    assert output.token_ids == (7,)
    sequence = decoding.get("a")
    assert sequence is not None
    assert (sequence.num_computed_tokens, sequence.num_tokens) == (6, 7)
    assert decoding.kv_cache.snapshot() == hash_blocks(PROMPT, BLOCK_SIZE, ROOT)
    (part,) = decoding.schedule(0.2).batch.sequences
    assert (part.start, part.token_ids) == (6, (7,))


def test_tokens_after_the_one_that_ends_a_sequence_are_dropped(decoding: Scheduler) -> None:
    (output,) = decode(decoding, [EOS, 6], [EOS, 6, 5]).outputs
    assert (output.token_ids, output.finish_reason) == ((EOS,), "stop")
    assert decoding.kv_cache.load().blocks_free == decoding.kv_cache.num_total_blocks


def test_the_last_token_of_a_prompt_is_prefill() -> None:
    """It goes in the policy's order, not before other prompts as a decode would."""
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=4)
    scheduler.add_request(new_request("a", PROMPT), 0.0)
    scheduler.update_from_output(scheduler.schedule(0.0), [[]])
    sequence = scheduler.get("a")
    assert sequence is not None
    assert (sequence.num_uncomputed_tokens, sequence.phase) == (1, SequencePhase.PREFILL)
    assert scheduler.load().waiting_prefill_tokens == 1
    scheduler.update_from_output(scheduler.schedule(0.1), [sampled(9)])
    assert sequence.phase is SequencePhase.DECODE
    assert scheduler.load().waiting_prefill_tokens == 0
