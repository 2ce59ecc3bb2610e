"""Requests that are invalid wherever they run: they end with the reason, and nobody is asked to try again."""

from __future__ import annotations

import pytest

from cluster.malformed import MalformedMessage
from cluster.messages import HandoffFenced, RequestError
from cluster.sequence_spec import RequestKey
from tests.decode_worker.test_decode_worker import Bench
from tests.engine.prefix_runner import VOCAB_SIZE, greedy


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    ("fields", "code", "named"),
    [
        ({"prompt_token_ids": [99]}, "invalid_request", "prompt token 99"),
        ({"sampling": greedy(repetition_penalty=1e-45)}, "invalid_request", "repetition_penalty is 1e-45"),
        ({"prompt_token_ids": [1] * 500}, "context_length_exceeded", "500"),
    ],
)
def test_a_request_that_cannot_run_fails_alone(
    bench: Bench, fields: dict[str, object], code: str, named: str
) -> None:
    bench.generate("bad", **fields)
    (output,) = bench.outputs()
    assert output.error is not None
    assert output.error.code == code
    assert named in output.error.message
    assert output.error.retryable == (code != "invalid_request"), "a larger worker may take the long one"
    assert bench.role.num_active == 0


def test_a_request_that_forbids_every_token_is_nobody_else_s_to_try(bench: Bench) -> None:
    sampling = greedy(4, min_tokens=4, stop_token_ids=tuple(range(VOCAB_SIZE)))
    bench.generate(prefill_worker=None, sampling=sampling)
    (output,) = bench.outputs()
    assert output.error == RequestError(
        code="invalid_request", message="no token is allowed by the parameters", retryable=False
    )
    assert bench.role.num_active == 0


def test_a_request_that_cannot_be_read_is_answered_and_never_retried(bench: Bench) -> None:
    def malformed(kind: str) -> MalformedMessage:
        return MalformedMessage(
            sender="router-0",
            incarnation=1,
            kind=kind,
            key=RequestKey("r", 2),
            reason="Expected `int`, got `str` - at `$.sampling.top_k`",
        )

    bench.decode.server.receive_malformed(malformed("cancel"))
    assert bench.outputs() == []
    bench.decode.server.receive_malformed(malformed("generate"))
    bench.decode.server.receive_malformed(malformed("generate"))  # a message may come twice
    (output,) = bench.outputs()
    assert (output.key, output.finish_reason) == (RequestKey("r", 2), "error")
    assert output.error is not None
    assert output.error.code == "undecodable_message"
    assert "$.sampling.top_k" in output.error.message
    assert not output.error.retryable


@pytest.mark.parametrize(
    ("retryable", "code"), [(True, "prefill_failed"), (False, "invalid_request")], ids=["fault", "refusal"]
)
def test_what_a_prefill_worker_refuses_as_invalid_is_not_retried(
    bench: Bench, retryable: bool, code: str
) -> None:
    bench.generate()
    error = RequestError(code="invalid_request", message="min_p is 7", retryable=retryable)
    bench.arrive(bench.prefill.peer, HandoffFenced(key=RequestKey("r", 1), error=error))
    (output,) = bench.outputs()
    assert output.error == RequestError(
        code=code, message="min_p is 7", retryable=retryable, worker="prefill-0"
    )
    assert bench.free_blocks
    assert bench.role.num_active == 0
