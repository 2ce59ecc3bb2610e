"""What a scheduler refuses."""

from __future__ import annotations


class RequestStateError(ValueError):
    """A request is unknown here, or not in a state in which it can do what was asked."""


class QueueFullError(RuntimeError):
    """The waiting queue is at its bound; the request was not added."""
