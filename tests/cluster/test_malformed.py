"""What can be said of a message that does not decode."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.malformed import MalformedMessage, identify
from cluster.messages import Envelope, Generate
from cluster.sampling_params import SamplingParams
from cluster.sequence_spec import RequestKey, SequenceSpec

GENERATE = Generate(
    key=RequestKey("r", 3),
    spec=SequenceSpec(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=4, seed=1)),
)


def payload(**changes: Any) -> bytes:
    """The message, with other values in it."""
    sender, incarnation, message = msgspec.to_builtins(Envelope("router-0", 7, GENERATE))
    return msgspec.msgpack.encode([sender, incarnation, message | changes])


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": {"prompt_token_ids": [1], "sampling": {"max_tokens": 4, "seed": 1, "top_k": "all"}}},
        {"spec": {"prompt_token_ids": [1], "sampling": None}},
        {"spec": {"prompt_token_ids": [1, 2.5]}},
        {"spec": None},
        {"type": "a message of tomorrow"},
    ],
)
def test_a_request_that_does_not_decode_is_known_by_its_id(changes: dict[str, Any]) -> None:
    data = payload(**changes)
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(data, type=Envelope)
    assert identify(data, "why") == MalformedMessage(
        sender="router-0",
        incarnation=7,
        kind=changes.get("type", "generate"),
        key=RequestKey("r", 3),
        reason="why",
    )


@pytest.mark.parametrize("changes", [{"key": [5, 1]}, {"key": ["r", None]}, {"key": ["r"]}, {"type": 1}])
def test_without_an_id_nobody_is_known(changes: dict[str, Any]) -> None:
    assert identify(payload(**changes), "why") is None


@given(position=st.integers(0, len(payload()) - 1), byte=st.integers(0, 255))
def test_damage_never_raises(position: int, byte: int) -> None:
    data = bytearray(payload())
    data[position] = byte
    identify(bytes(data), "why")
    identify(bytes(data[:position]), "why")
