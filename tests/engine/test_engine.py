"""What one engine does with requests, step by step, on a tiny model whose tokens depend on every position."""

from __future__ import annotations

import pytest

from engine.engine import Engine
from engine.scheduler.errors import QueueFullError, RequestStateError
from tests.engine.prefix_runner import (
    VOCAB_SIZE,
    Collector,
    chunk_lengths,
    greedy,
    make_engine,
    new_request,
    oracle,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]


def run(engine: Engine, *requests: object) -> Collector:
    collector = Collector(engine)
    for request in requests:
        engine.add_request(request, 0.0)  # type: ignore[arg-type]
    collector.run()
    return collector


def test_a_prompt_is_computed_in_chunks_and_answered() -> None:
    engine, runner = make_engine(max_num_batched_tokens=8)
    collector = run(engine, new_request("a", PROMPT))
    assert collector.tokens["a"] == oracle(PROMPT, greedy())
    assert chunk_lengths(runner, "a")[:3] == [8, 6, 1]


def test_decodes_come_before_prompts_in_one_budget() -> None:
    engine, runner = make_engine(max_num_batched_tokens=8)
    collector = Collector(engine)
    engine.add_request(new_request("first", PROMPT[:4], greedy(12, ignore_eos=True)), 0.0)
    collector.step()
    engine.add_request(new_request("second", PROMPT), 0.0)
    collector.step()
    batch = runner.batches[-1]
    assert [(part.request_id, len(part.token_ids)) for part in batch.sequences] == [
        ("first", 1),
        ("second", 7),
    ]
    collector.run()
    assert collector.tokens["second"] == oracle(PROMPT, greedy())


def test_the_shortest_remaining_prompt_goes_first_but_age_counts() -> None:
    engine, runner = make_engine(max_num_batched_tokens=8, max_num_seqs=8, ageing_tokens_per_second=10.0)
    engine.add_request(new_request("long", list(range(20)) * 2), 0.0)
    engine.add_request(new_request("short", PROMPT[:6]), 0.0)
    engine.step(0.0)
    assert runner.batches[-1].sequences[0].request_id == "short"
    engine.add_request(new_request("late", PROMPT[:6][::-1]), 100.0)
    engine.step(100.0)  # "long" has waited 100 s: worth 1,000 tokens
    assert "late" not in [part.request_id for part in runner.batches[-1].sequences]


def test_a_second_request_finds_the_prefix_of_the_first() -> None:
    engine, runner = make_engine()
    run(engine, new_request("a", PROMPT))
    collector = run(engine, new_request("b", [*PROMPT, 2]))
    assert chunk_lengths(runner, "b")[0] == len(PROMPT) + 1 - 12  # three blocks of four
    assert collector.finished["b"].num_cached_tokens == 12
    assert collector.tokens["b"] == oracle([*PROMPT, 2], greedy())


def test_another_cache_salt_finds_nothing() -> None:
    engine, _ = make_engine()
    run(engine, new_request("a", PROMPT))
    collector = run(engine, new_request("b", PROMPT, cache_salt="tenant"))
    assert collector.finished["b"].num_cached_tokens == 0


def test_preempted_requests_give_the_same_tokens() -> None:
    engine, _ = make_engine(num_blocks=12, max_num_batched_tokens=16, watermark=0.0)
    sampling = greedy(20, ignore_eos=True)
    prompts = {f"r{index}": [(index * 5 + i) % 20 for i in range(9)] for index in range(4)}
    collector = run(engine, *(new_request(name, prompt, sampling) for name, prompt in prompts.items()))
    assert engine.load().queue.preemptions_total > 0
    for name, prompt in prompts.items():
        assert collector.tokens[name] == oracle(prompt, sampling), name


def test_an_activated_request_that_is_preempted_is_computed_here() -> None:
    """It must not ask its peer again: the peer knows the prompt only, and has forgotten it."""
    engine, runner = make_engine(num_blocks=12, watermark=0.0)
    sampling = greedy(20, ignore_eos=True)
    engine.add_request(new_request("old", [1] * 9, sampling), 0.0)
    engine.add_request(new_request("remote", PROMPT, sampling, remote_prefill=True), 0.0)
    collector = Collector(engine)
    reservations = list(collector.step().reservations)
    runner.write(reservations[0].block_ids, 0, PROMPT)
    engine.activate("remote", oracle(PROMPT, sampling)[0], None)
    while engine.has_work():
        reservations += collector.step().reservations
    assert engine.load().queue.preemptions_total > 0
    assert len(reservations) == 1
    assert collector.tokens["remote"] == oracle(PROMPT, sampling)


def test_an_abort_after_the_first_token_ended_a_request_silences_it() -> None:
    engine, runner = make_engine()
    engine.add_request(new_request("r", PROMPT, greedy(1), remote_prefill=True), 0.0)
    (reservation,) = engine.step(0.0).reservations
    runner.write(reservation.block_ids, 0, PROMPT)
    engine.activate("r", 5, None)
    assert not engine.abort("r")  # it has ended, only nobody was told yet
    assert engine.step(0.1).outputs == ()
    assert engine.load().kv.blocks_free == engine.load().kv.blocks_total


def test_prefill_only_reports_progress_and_holds_its_blocks() -> None:
    engine, runner = make_engine(max_num_batched_tokens=8)
    collector = run(engine, new_request("p", PROMPT, prefill_only=True))
    progress = [one for result in collector.results for one in result.progress]
    assert [one.num_computed_tokens for one in progress] == [8, 14]
    assert [one.is_first_chunk for one in progress] == [True, False]
    assert collector.tokens["p"] == oracle(PROMPT, greedy())[:1]
    assert engine.load().kv.blocks_pinned == 4
    assert runner.kv[list(progress[-1].block_ids)].flatten()[:14].tolist() == PROMPT
    assert engine.release("p")
    assert engine.load().kv.blocks_free == engine.load().kv.blocks_total


def test_quarantined_blocks_are_not_reused_until_released() -> None:
    engine, runner = make_engine(num_blocks=9)
    engine.add_request(new_request("r", PROMPT, remote_prefill=True), 0.0)
    (reservation,) = engine.step(0.0).reservations
    assert engine.abort("r", quarantine=True)
    assert engine.load().kv.blocks_quarantined == 4
    run(engine, new_request("next", [2] * 9, greedy(6, ignore_eos=True)))
    used = {block for batch in runner.batches for part in batch.sequences for block in part.block_ids}
    assert used
    assert not used & set(reservation.block_ids)
    assert engine.release_quarantined("r")
    assert engine.load().kv.blocks_quarantined == 0


def test_without_prefix_caching_nothing_is_found_or_announced() -> None:
    engine, _ = make_engine(prefix_caching=False)
    collector = run(engine, new_request("a", PROMPT))
    collector_again = run(engine, new_request("b", PROMPT))
    assert collector_again.finished["b"].num_cached_tokens == 0
    assert all(not result.blocks_stored for result in collector.results)
    assert engine.cached_block_hashes() == []


def test_a_failing_step_fails_its_requests_only() -> None:
    engine, runner = make_engine(max_num_seqs=1)
    engine.add_request(new_request("a", PROMPT), 0.0)
    engine.add_request(new_request("b", PROMPT[::-1]), 0.0)
    runner.fail_next = True
    collector = Collector(engine)
    collector.run()
    assert collector.finished["a"].error == "RuntimeError in a model step: device lost"
    assert collector.tokens["b"] == oracle(PROMPT[::-1], greedy())


def test_steps_launched_ahead_give_the_same_tokens() -> None:
    """Chunks of one prompt are in flight together; a decode waits for the token it goes on from."""
    engine, runner = make_engine(num_blocks=14, max_num_batched_tokens=4, max_num_seqs=4, watermark=0.0)
    sampling = greedy(20, ignore_eos=True)
    prompts = {f"r{index}": [(index * 5 + i) % 20 for i in range(9)] for index in range(4)}
    for name, prompt in prompts.items():
        engine.add_request(new_request(name, prompt, sampling), 0.0)
    collector = Collector(engine)
    for _ in range(3):
        collector.launch()
    assert chunk_lengths(runner, "r0") == [4, 4, 1]
    collector.run(ahead=3)
    assert engine.load().queue.preemptions_total > 0
    for name, prompt in prompts.items():
        assert collector.tokens[name] == oracle(prompt, sampling), name


def test_blocks_that_a_step_in_flight_writes_are_not_reused_before_it_is_over() -> None:
    engine, _runner = make_engine(max_num_batched_tokens=8)
    engine.add_request(new_request("a", PROMPT), 0.0)
    step = engine.launch(0.0)
    assert engine.abort("a")
    kv = engine.load().kv
    assert kv.blocks_total - kv.blocks_free == 2, "of the four blocks those of the first chunk"
    result = engine.collect(step)
    assert (result.num_tokens, result.outputs) == (8, ())
    assert engine.load().kv.blocks_free == kv.blocks_total
    assert engine.cached_block_hashes() == []


def test_a_reservation_aborted_since_its_launch_is_not_reported() -> None:
    engine, _runner = make_engine()
    engine.add_request(new_request("a", PROMPT, remote_prefill=True), 0.0)
    step = engine.launch(0.0)
    assert engine.abort("a")
    assert engine.collect(step).reservations == ()


def test_a_failing_step_in_flight_fails_the_next_part_of_its_requests_too() -> None:
    engine, runner = make_engine(max_num_batched_tokens=8)
    engine.add_request(new_request("a", PROMPT), 0.0)
    runner.fail_next = True
    collector = Collector(engine)
    collector.run(ahead=2)
    assert collector.finished["a"].error == "RuntimeError in a model step: device lost"
    assert len(runner.batches) == 2
    assert engine.load().kv.blocks_free == engine.load().kv.blocks_total


@pytest.mark.parametrize(
    ("prompt", "named"),
    [([], "prompt"), ([1, VOCAB_SIZE], f"prompt token {VOCAB_SIZE}"), ([1] * 129, "129")],
)
def test_impossible_requests_are_refused_by_name(prompt: list[int], named: str) -> None:
    engine, _ = make_engine()
    with pytest.raises(ValueError, match=named):
        engine.add_request(new_request("a", prompt), 0.0)
    assert not engine.has_work()


def test_ids_in_use_and_full_queues_are_refused() -> None:
    engine, _ = make_engine(max_num_waiting=2)
    engine.add_request(new_request("a", PROMPT), 0.0)
    with pytest.raises(RequestStateError, match="a exists"):
        engine.add_request(new_request("a", PROMPT), 0.0)
    engine.add_request(new_request("b", PROMPT), 0.0)
    with pytest.raises(QueueFullError, match="2 requests"):
        engine.add_request(new_request("c", PROMPT), 0.0)


@pytest.mark.parametrize("quarantine", [False, True])
def test_what_a_failed_peer_wrote_is_found_by_the_next_attempt(quarantine: bool) -> None:
    engine, runner = make_engine(block_size=4)
    prompt = list(range(11))
    engine.add_request(new_request("r#0", prompt, remote_prefill=True), 0.0)
    (reservation,) = engine.step(0.0).reservations
    runner.write(reservation.block_ids, 0, prompt[:9])  # two full blocks, and a part of the third
    engine.give_up_remote("r#0", 9, "the peer died", quarantine=quarantine)
    (output,) = engine.step(0.1).outputs
    assert (output.finish_reason, output.error) == ("error", "the peer died")
    assert engine.load().kv.blocks_quarantined == (1 if quarantine else 0)
    engine.add_request(new_request("r#1", prompt, remote_prefill=True), 0.2)
    (again,) = engine.step(0.2).reservations
    assert again.num_cached_tokens == 8
    assert again.block_ids[:2] == reservation.block_ids[:2]
    if quarantine:
        assert again.block_ids[2] != reservation.block_ids[2]
    with pytest.raises(RequestStateError, match="has finished"):
        engine.give_up_remote("r#0", 0, "again", quarantine=False)
    with pytest.raises(ValueError, match="num_landed_tokens of request r#1 is 12"):
        engine.give_up_remote("r#1", 12, "too much", quarantine=False)


def test_the_load_tells_steps_and_what_the_prefix_cache_found() -> None:
    engine, _runner = make_engine()
    run(engine, new_request("first", PROMPT, greedy(3, ignore_eos=True)))
    first = engine.load()
    assert (first.kv.prefix_queries_total, first.kv.prefix_hits_total) == (len(PROMPT), 0)
    assert [sample.num_tokens for sample in first.steps.recent] == [len(PROMPT), 1, 1]
    assert [sample.num_context_tokens for sample in first.steps.recent] == [
        len(PROMPT) + step for step in range(3)
    ]
    run(engine, new_request("again", PROMPT, greedy(1)))
    again = engine.load()
    cached = (len(PROMPT) - 1) // 4 * 4  # in whole blocks, and the last token is computed
    assert (again.kv.prefix_queries_total, again.kv.prefix_hits_total) == (2 * len(PROMPT), cached)
    assert again.steps.recent[-1].num_tokens == len(PROMPT) - cached
    assert again.steps.steps_total == first.steps.steps_total + 1
