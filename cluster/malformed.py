"""Messages that cannot be read: whose request they are about, so that it ends at once and with the reason."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cluster.sequence_spec import RequestKey

UNDECODABLE = "undecodable_message"  # the code of the error that such a message's request ends with


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedMessage:
    """What is known of a message of one request that is not as its type demands."""

    sender: str
    incarnation: int
    kind: str  # the message's tag: "generate", "prefill", ...
    key: RequestKey
    reason: str  # what is wrong with it


class _Identity(msgspec.Struct, frozen=True):
    type: str
    key: RequestKey


class _Outline(msgspec.Struct, frozen=True, array_like=True):
    """An ``Envelope`` of which only what names the request is looked at."""

    sender: str
    incarnation: int
    message: _Identity


_decoder = msgspec.msgpack.Decoder(_Outline)


def identify(payload: bytes, reason: str) -> MalformedMessage | None:
    """Whose message ``payload`` is, which did not decode for ``reason``; None if even that is unreadable."""
    try:
        outline = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return None
    return MalformedMessage(
        sender=outline.sender,
        incarnation=outline.incarnation,
        kind=outline.message.type,
        key=outline.message.key,
        reason=reason,
    )
