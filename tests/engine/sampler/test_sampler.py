"""Which token is drawn: each parameter's effect, and that company never changes a draw."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.sampling_params import SamplingParams
from cluster.sequence_spec import SequenceSpec
from engine.sampler.logits_state import logits_states
from engine.sampler.params_check import check_sampling_params
from engine.sampler.penalties import Penalties
from engine.sampler.sampler import Sampler, SamplingRow
from engine.sequence import SampledToken

VOCAB_SIZE = 3000  # more than the sampler sorts at first
EOS = 7
SAMPLER = Sampler((EOS,))


def params(**values: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "seed": 1, **values})  # type: ignore[arg-type]


def row(sampling: SamplingParams, position: int = 0, **values: object) -> SamplingRow:
    return SamplingRow(
        sampling=sampling,
        position=position,
        **{"num_output_tokens": 8, **values},  # type: ignore[arg-type]
    )


def logits_of(probabilities: dict[int, float]) -> torch.Tensor:
    logits = torch.full((VOCAB_SIZE,), -30.0)
    for token_id, probability in probabilities.items():
        logits[token_id] = math.log(probability)
    return logits


def draw(logits: torch.Tensor, sampling: SamplingParams, count: int = 4000) -> Counter[int]:
    rows = [row(sampling, position) for position in range(count)]
    return Counter(token.token_id for token in SAMPLER.sample(logits.expand(count, -1), rows))


def one(logits: torch.Tensor, given_row: SamplingRow) -> SampledToken:
    return SAMPLER.sample(logits.unsqueeze(0), [given_row])[0]


FOUR = logits_of({10: 0.5, 20: 0.3, 30: 0.15, 40: 0.05})


def test_greedy_takes_the_most_likely() -> None:
    assert one(FOUR, row(params(temperature=0.0))).token_id == 10


def test_draws_follow_the_distribution() -> None:
    counts = draw(FOUR, params(temperature=1.0))
    for token_id, probability in ((10, 0.5), (20, 0.3), (30, 0.15), (40, 0.05)):
        assert abs(counts[token_id] / 4000 - probability) < 0.03
    assert sum(counts.values()) == 4000


def test_temperature_sharpens() -> None:
    counts = draw(FOUR, params(temperature=0.5))
    total = 0.5**2 + 0.3**2 + 0.15**2 + 0.05**2
    assert abs(counts[10] / 4000 - 0.25 / total) < 0.03


def test_top_k_keeps_k_tokens() -> None:
    assert set(draw(FOUR, params(top_k=2))) == {10, 20}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert set(draw(FOUR, params(top_p=0.79))) == {10, 20}
    assert set(draw(FOUR, params(top_p=0.81))) == {10, 20, 30}
    assert set(draw(FOUR, params(top_p=1e-6))) == {10}


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert set(draw(FOUR, params(min_p=0.25))) == {10, 20, 30}


def test_a_flat_distribution_wider_than_what_is_sorted_first() -> None:
    flat = torch.zeros(VOCAB_SIZE)
    counts = draw(flat, params(top_p=0.999))
    assert len(counts) > 1500
    assert max(counts.values()) < 15


def test_logit_bias_forbids_and_forces() -> None:
    assert one(FOUR, row(params(temperature=0.0, logit_bias={10: -100.0}))).token_id == 20
    assert one(FOUR, row(params(temperature=0.0, logit_bias={99: 100.0}))).token_id == 99


def test_min_tokens_masks_ends() -> None:
    logits = logits_of({EOS: 0.6, 11: 0.3, 12: 0.1})
    early = {"num_output_tokens": 2}
    sampling = params(temperature=0.0, min_tokens=3, stop_token_ids=(11,))
    assert one(logits, row(sampling, **early)).token_id == 12
    assert one(logits, row(sampling, num_output_tokens=3)).token_id == EOS


def test_penalties() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[10], logits[20], logits[30] = 4.0, 3.0, 2.5

    def chosen(**penalty: float) -> int:
        sampling = params(temperature=0.0, **penalty)
        (state,) = logits_states(
            SequenceSpec(prompt_token_ids=[20], output_token_ids=[10], sampling=sampling)
        )
        state.accept([10])
        return one(logits, row(sampling, logits_states=[state])).token_id

    assert chosen(repetition_penalty=2.0) == 30
    assert chosen(frequency_penalty=0.6) == 20
    assert chosen(frequency_penalty=0.4) == 10
    assert chosen(presence_penalty=1.1) == 20


def test_logprobs_are_of_the_raw_distribution() -> None:
    token = one(FOUR, row(params(temperature=0.0, logit_bias={10: -100.0}, logprobs=2)))
    assert token.logprobs is not None
    assert token.token_id == token.logprobs.token_id == 20
    assert token.logprobs.rank == 2
    assert token.logprobs.logprob == pytest.approx(math.log(0.3), abs=1e-4)
    assert [token_id for token_id, _ in token.logprobs.top] == [10, 20]
    assert token.logprobs.top[0][1] == pytest.approx(math.log(0.5), abs=1e-4)


def test_logprobs_of_the_sampled_token_only() -> None:
    token = one(FOUR, row(params(temperature=0.0, logprobs=0)))
    assert token.logprobs is not None
    assert token.logprobs.top == ()
    assert token.logprobs.rank == 1


def test_unusable_rows_fail_alone() -> None:
    rows = [row(params(temperature=0.0))] * 3
    tokens = SAMPLER.sample(torch.stack([FOUR, FOUR * torch.nan, torch.full_like(FOUR, -torch.inf)]), rows)
    assert tokens[0].token_id == 10
    assert tokens[0].error is None
    assert tokens[1].error == tokens[2].error == "the model gave logits that are not finite"


def test_top_p_zero_is_greedy_even_among_equals() -> None:
    equal = logits_of({10: 0.4, 20: 0.4, 30: 0.2})
    assert set(draw(equal, params(top_p=0.0), 50)) == {10}
    assert set(draw(equal, params(top_p=1e-320), 200)) == {10, 20}


def test_forbidding_every_token_is_the_request_s_own_fault() -> None:
    small = torch.zeros(1, 3)
    sampling = params(min_tokens=9, stop_token_ids=(0, 1, 2))
    (token,) = Sampler((2,)).sample(small, [row(sampling)])
    assert (token.error, token.is_refusal) == ("no token is allowed by the parameters", True)
    (token,) = Sampler((2,)).sample(small * torch.nan, [row(sampling)])
    assert (token.error, token.is_refusal) == ("the model gave logits that are not finite", False)


LARGEST = torch.finfo(torch.float32).max
edges = st.builds(
    params,
    temperature=st.sampled_from([0.0, -0.0, 5e-324, 1e-45, 9e-6, 1e-5, 1e-3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2999, 3000, 2**31, 2**63 - 1]),
    top_p=st.sampled_from([0.0, -0.0, 5e-324, 1e-45, 1e-10, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, -0.0, 5e-324, 1e-45, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([0.01, 0.5, 1.0, 10.0]),
    frequency_penalty=st.sampled_from([-2.0, -5e-324, -0.0, 0.0, 1e-45, 2.0]),
    presence_penalty=st.sampled_from([-2.0, -0.0, 0.0, 1e-45, 2.0]),
    logit_bias=st.dictionaries(st.sampled_from([0, 5, EOS]), st.sampled_from([-100.0, -0.0, 5e-324, 100.0])),
    min_tokens=st.sampled_from([0, 8]),
    stop_token_ids=st.sampled_from([(), (5,)]),
)


@given(sampling=edges, scale=st.sampled_from([0.0, 1e-45, 1.0, 1e4, 1e30, LARGEST]), seed=st.integers(0, 20))
def test_no_allowed_parameters_leave_nothing_to_choose(
    sampling: SamplingParams, scale: float, seed: int
) -> None:
    check_sampling_params(sampling, VOCAB_SIZE)
    logits = torch.rand(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    logits = logits * scale
    spec = SequenceSpec(
        prompt_token_ids=[0, 5, 9, int(logits.argmax())],
        output_token_ids=[5, 5, EOS, int(logits.argmin())],
        sampling=sampling,
    )
    token = one(logits, row(sampling, num_output_tokens=4, logits_states=[Penalties(spec)]))
    assert token.error is None
    assert 0 <= token.token_id < VOCAB_SIZE
    if sampling.min_tokens:
        assert token.token_id not in (EOS, *sampling.stop_token_ids)


samplings = st.builds(
    params,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.8]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    min_p=st.sampled_from([0.0, 0.05]),
    logprobs=st.sampled_from([None, 0, 3]),
)


@given(
    given_rows=st.lists(st.tuples(samplings, st.integers(0, 500)), min_size=1, max_size=6),
    seed=st.integers(0, 100),
)
def test_a_row_draws_the_same_alone_and_in_company(
    given_rows: list[tuple[SamplingParams, int]], seed: int
) -> None:
    logits = torch.randn(len(given_rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    rows = [row(sampling, position) for sampling, position in given_rows]
    together = SAMPLER.sample(logits, rows)
    for index, given_row in enumerate(rows):
        alone = one(logits[index], given_row)
        assert alone.token_id == together[index].token_id
        assert alone.logprobs == together[index].logprobs


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": 9}, r"min_tokens is 9, must be from 0 to max_tokens \(8\)"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": -0.1}, "top_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": 1e-320}, r"repetition_penalty is 1e-320, must be from 0.01 to 10"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"frequency_penalty": 1e308}, r"frequency_penalty is 1e\+308, must be from -2 to 2"),
        ({"presence_penalty": -math.inf}, "presence_penalty is -inf"),
        ({"logprobs": 1000}, "logprobs is 1000"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, f"token {VOCAB_SIZE}"),
        ({"logit_bias": {1: math.nan}}, "token 1 is nan"),
        ({"logit_bias": {1: 1e308}}, r"token 1 is 1e\+308, must be from -100 to 100"),
        ({"stop_token_ids": (-1,)}, "token -1"),
    ],
)
def test_wrong_parameters_are_named(values: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_sampling_params(params(**values), VOCAB_SIZE)
