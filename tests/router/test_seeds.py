"""The seeds of a request's choices: all different, and the same for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.response.seeds import choice_seed
from tests.router.conftest import MODEL, StartRouter
from tests.router.scripted_worker import EOS, ScriptedWorker, answer
from text_pipeline.tokenizer import Tokenizer

MakeWorker = Callable[..., ScriptedWorker]
SEEDS = st.integers(-(2**63), 2**63 - 1)
PLACES = st.tuples(SEEDS, st.integers(0, 2**16), st.integers(0, 2**10))


@pytest.mark.parametrize(
    ("seed", "prompt", "choice", "expected"),
    [
        (0, 0, 0, 8010594611326568526),
        (0, 0, 1, 4058328530121238850),
        (1, 0, 0, 7822898332545283737),
        (-1, 0, 0, 9097950096647113640),
        (2**63 - 1, 3, 15, 5626491518864586036),
    ],
)
def test_the_values_never_change(seed: int, prompt: int, choice: int, expected: int) -> None:
    assert choice_seed(seed, prompt, choice) == expected


@given(PLACES)
def test_each_is_a_seed_that_the_engine_takes(place: tuple[int, int, int]) -> None:
    assert 0 <= choice_seed(*place) < 2**63


@given(PLACES, PLACES)
def test_another_place_has_another_seed(one: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    assert (choice_seed(*one) == choice_seed(*other)) == (one == other)


def test_small_seeds_do_not_overlap() -> None:
    seeds = {choice_seed(s, p, c) for s in range(-64, 64) for p in range(16) for c in range(16)}
    assert len(seeds) == 128 * 16 * 16


async def test_seeds_0_to_3_with_four_choices_give_16_answers(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    worker = make_worker(script=answer_with_its_seed(tokenizer))
    router = await start_router(worker)
    answers: list[str] = []
    for seed in range(4):
        for _ in range(2):  # the same again
            completion = await router.openai.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hello"}], n=4, seed=seed
            )
            answers += [choice.message.content for choice in completion.choices]
    assert len(set(answers)) == 16
    assert all(answers.count(text) == 2 for text in answers)
    assert answers[:8] == [*answers[:4], *answers[:4]]


async def test_choices_of_all_prompts_differ_and_do_not_depend_on_how_many_are_asked_for(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    router = await start_router(make_worker(script=answer_with_its_seed(tokenizer)))

    async def texts(prompts: int, n: int) -> list[str]:
        completion = await router.openai.completions.create(
            model=MODEL, prompt=["the same"] * prompts, n=n, seed=40, max_tokens=100
        )
        return [choice.text for choice in completion.choices]

    four = await texts(prompts=2, n=2)
    assert len(set(four)) == 4
    assert await texts(prompts=1, n=1) == four[:1]
    assert await texts(prompts=2, n=1) == [four[0], four[2]]
    six = await texts(prompts=2, n=3)
    assert [six[:2], six[3:5]] == [four[:2], four[2:]]


def answer_with_its_seed(tokenizer: Tokenizer) -> Any:
    async def script(message: Any) -> Any:
        async for fields in answer([*tokenizer.encode(f"seed {message.spec.sampling.seed}"), EOS])(message):
            yield fields

    return script
