"""Messages on the wire: what is sent is what arrives, and defaults that are left out come back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cluster.load import KvLoad, LinkReport, LoadReport, QueueLoad, StepLoad, StepSample
from cluster.members import PROTOCOL_VERSION
from cluster.messages import (
    Cancel,
    Drain,
    Envelope,
    HandoffFenced,
    HandoffLanding,
    HandoffProgress,
    LoadUpdate,
    Message,
    Prefill,
    RequestError,
    RequestTimings,
    Sealed,
    TokenBatch,
    TokenLogprobs,
    TokenOutput,
)
from cluster.sampling_params import SamplingParams
from cluster.sequence_spec import RequestKey
from tests.sequence_specs import with_spec

LARGEST = 2**64 - 1  # an xxh3


def prefill(**fields: Any) -> Prefill:
    values: dict[str, Any] = {
        "key": RequestKey("r", 2),
        "prompt_token_ids": [1, 2, 3],
        "sampling": SamplingParams(max_tokens=5, seed=7),
        "prefill_incarnation": 1_700_000_000_000_000_000,
        "first_block": 1,
        "block_ids": [9, 4],
    }
    return Prefill(**with_spec(values | fields))


def sealed(**fields: Any) -> Sealed:
    values: dict[str, Any] = {
        "key": RequestKey("r", 2),
        "incarnation": 3,
        "token_id": 42,
        "logprobs": TokenLogprobs(token_id=42, logprob=-0.5, rank=1, top=((42, -0.5), (7, -1.25))),
        "timings": RequestTimings(prefill_ms=1.5, transfer_bytes=4096, prefill_worker="p0"),
    }
    return Sealed(**(values | fields))


@pytest.mark.parametrize(
    "message",
    [
        HandoffProgress(handoffs=[]),
        HandoffProgress(
            handoffs=[
                HandoffLanding(key=RequestKey("a", 0), num_landed_blocks=0, num_bytes=0),
                HandoffLanding(key=RequestKey("b", 4), num_landed_blocks=7, num_bytes=2**40),
            ]
        ),
        Drain(),
        prefill(),
        prefill(output_token_ids=[8, 9], cache_salt="tenant", deadline=1_700_000_000.25),
        sealed(),
        sealed(logprobs=None, checksums=[(0, 0), (5, LARGEST)]),
        HandoffFenced(key=RequestKey("r", 1)),
        HandoffFenced(key=RequestKey("r", 1), error=RequestError(code="prefill_failed", message="m")),
        Cancel(key=RequestKey("r", 1), reason="moved"),
        TokenBatch(
            outputs=[
                TokenOutput(
                    key=RequestKey("r", 1),
                    finish_reason="error",
                    error=RequestError(code="prefill_failed", message="m", retryable=True, worker="p0"),
                )
            ]
        ),
        LoadUpdate(
            load=LoadReport(
                queue=QueueLoad(running=3),
                kv=KvLoad(blocks_free=4),
                steps=StepLoad(steps_total=9, recent=(StepSample(5, 60, 2, 7.5), StepSample(1, 61, 1, 2.5))),
                handoffs={"fencing": 2},
                links=(LinkReport(peer="d0", probe_gbps=4.5, gbps=0.25),),
            )
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_survives_the_wire(message: Message) -> None:
    envelope = Envelope("w0", 1_700_000_000_000_000_000, message)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(envelope), type=Envelope) == envelope


def test_a_seal_survives_as_a_notification() -> None:
    """It travels alone, without an envelope."""
    message = sealed(checksums=[(0, LARGEST), (3, 1)])
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Sealed)
    assert arrived == message
    assert arrived.checksums == [(0, LARGEST), (3, 1)]


def test_what_is_prefilled_is_the_prompt_and_the_answer_so_far() -> None:
    assert prefill().spec.num_tokens == 3
    assert prefill(output_token_ids=[8, 9]).spec.num_tokens == 5


def test_messages_of_this_kind_have_their_own_version() -> None:
    """Workers of an earlier version say a request field by field: never paired."""
    assert PROTOCOL_VERSION == 4
