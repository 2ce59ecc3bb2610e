"""How many sequences this router serves at a time."""

from __future__ import annotations


class AdmissionError(Exception):
    """The router is full. ``never_fits``: the request alone exceeds the limit."""

    def __init__(self, limit: int, *, never_fits: bool) -> None:
        self.limit = limit
        self.never_fits = never_fits
        super().__init__(f"at most {limit} sequences are served at a time")


class Admission:
    """A counter with a bound. A request is admitted with all its sequences or not at all."""

    def __init__(self, max_sequences: int) -> None:
        if max_sequences < 1:
            raise ValueError(f"max_sequences is {max_sequences}, must be at least 1")
        self.max_sequences = max_sequences
        self.num_admitted = 0

    def admit(self, num_sequences: int) -> None:
        """Take places for ``num_sequences``. Raises AdmissionError if there are too few."""
        if num_sequences > self.max_sequences:
            raise AdmissionError(self.max_sequences, never_fits=True)
        if self.num_admitted + num_sequences > self.max_sequences:
            raise AdmissionError(self.max_sequences, never_fits=False)
        self.num_admitted += num_sequences

    def release(self, num_sequences: int) -> None:
        """Give back what ``admit`` took."""
        self.num_admitted -= num_sequences
        assert self.num_admitted >= 0
