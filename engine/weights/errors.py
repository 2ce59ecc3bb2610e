"""What may be wrong with a model's weights."""

from __future__ import annotations


class WeightError(ValueError):
    """The weights do not fit the model; the message names the file, the tensor, and what was expected."""


class ShardError(WeightError):
    """A tensor cannot be split as a rank needs it: not evenly, or only inside of quantised blocks."""
