"""The engine's sampling settings from a request, the model's recommendations, and the API's defaults."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.sampling_params import SamplingParams
from model_files.generation_defaults import OPENAI_DEFAULTS, GenerationDefaults
from router.api.errors import ApiError
from router.api.request.schemas import CompletionRequest
from router.api.request.validation import sampling_params
from router.served_model import ServedModel


def sampling(defaults: GenerationDefaults = OPENAI_DEFAULTS, **body: Any) -> SamplingParams:
    model = ServedModel(
        name="m",
        fingerprint="f",
        max_model_len=100,
        vocab_size=50,
        eos_token_ids=(2,),
        hash_groups=(),
        defaults=defaults,
    )
    request = CompletionRequest.model_validate({"model": "m", "prompt": "p", **body})
    return sampling_params(request, model, max_tokens=8, logprobs=None)


def test_without_recommendations_openai_s_defaults_hold() -> None:
    params = sampling()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert params.repetition_penalty == 1.0


def test_the_model_s_recommendations_fill_in_and_the_request_wins() -> None:
    recommended = GenerationDefaults(temperature=0.2, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1)
    params = sampling(recommended)
    assert (params.temperature, params.top_p, params.top_k) == (0.2, 0.9, 40)
    assert (params.min_p, params.repetition_penalty) == (0.1, 1.1)
    params = sampling(recommended, temperature=0, top_p=1.0, top_k=-1, min_p=0, repetition_penalty=1.0)
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 1.0, 0)
    assert (params.min_p, params.repetition_penalty) == (0.0, 1.0)


def test_a_seed_is_kept_or_drawn() -> None:
    assert sampling(seed=5).seed == 5
    assert sampling(seed=-1).seed == -1
    assert sampling().seed != sampling().seed


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"min_tokens": 9}, "'min_tokens' is 9"),
        ({"stop_token_ids": [50]}, "Invalid token id 50"),
        ({"logit_bias": {"77": 1}}, "77"),
    ],
)
def test_what_the_model_cannot_do_is_named(body: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiError) as error:
        sampling(**body)
    assert named in str(error.value)
