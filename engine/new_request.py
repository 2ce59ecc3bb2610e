"""What callers give an engine to run."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.sequence_spec import SequenceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """One sequence to run.

    With ``remote_prefill`` the engine only reserves blocks for the prompt (reported as a ``Reservation``)
    and waits for ``Engine.activate``. With ``prefill_only`` it samples one token, finishes, and keeps the
    blocks until ``Engine.release``, so that they can still be sent. Deadlines are the caller's to keep.
    """

    request_id: str  # unique within the engine
    spec: SequenceSpec
    remote_prefill: bool = False
    prefill_only: bool = False
