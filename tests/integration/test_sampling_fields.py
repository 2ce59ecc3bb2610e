"""Whatever sampling fields the API accepts, an engine answers, or refuses where the request forbids all."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.sampling_params import SamplingParams
from router.api.request.schemas import CompletionRequest
from router.api.request.validation import sampling_params
from router.served_model import ServedModel
from tests.engine.prefix_runner import EOS, VOCAB_SIZE, Collector, make_engine, new_request
from tests.router.request_values import sampling_bodies

MODEL = ServedModel(
    name="m", fingerprint="f", max_model_len=128, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), hash_groups=()
)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
MAX_TOKENS = 4


@settings(max_examples=150, deadline=None)
@given(bodies=st.lists(sampling_bodies(), min_size=1, max_size=4))
@example(bodies=[{"min_tokens": 4, "stop_token_ids": list(range(VOCAB_SIZE))}])
@example(bodies=[{"repetition_penalty": 0.01, "temperature": 1e-5, "top_k": 2**63 - 1}])
def test_every_accepted_combination_is_answered(bodies: list[dict[str, Any]]) -> None:
    engine, _ = make_engine()
    collector = Collector(engine)
    for index, fields in enumerate(bodies):
        body = CompletionRequest.model_validate({"model": "m", "prompt": "p", **fields})
        sampling = sampling_params(body, MODEL, max_tokens=MAX_TOKENS, logprobs=3)
        sampling = msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams)
        engine.add_request(new_request(f"r{index}", PROMPT, sampling), 0.0)
    collector.run(max_steps=100)
    for index, fields in enumerate(bodies):
        end = collector.finished[f"r{index}"]
        forbidden = {*fields.get("stop_token_ids", ()), *(() if fields.get("ignore_eos") else (EOS,))}
        if fields.get("min_tokens") and len(forbidden) == VOCAB_SIZE:
            assert (end.error, end.is_refusal) == ("no token is allowed by the parameters", True)
        else:
            assert end.error is None
            assert 1 <= len(collector.tokens[f"r{index}"]) <= MAX_TOKENS
