"""What a scheduler refuses."""

from __future__ import annotations


class RequestStateError(ValueError):
    """A request is unknown here, or not in a state in which it can do what was asked."""


class DoesNotFitError(ValueError):
    """A request is longer than this engine can ever hold; another one may be larger."""


class QueueFullError(RuntimeError):
    """The waiting queue is at its bound; the request was not added."""


def is_refusal(error: BaseException) -> bool:
    """Whether ``add_request`` failed because of the request itself, so that every engine would refuse it."""
    return isinstance(error, ValueError) and not isinstance(error, RequestStateError | DoesNotFitError)
