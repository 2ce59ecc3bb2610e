"""Values at the edge of what JSON and the wire can say, and bodies made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

NUMBERS: tuple[Any, ...] = (
    0,
    -0.0,
    5e-324,
    1e-320,
    1e-45,
    2.3e-308,
    9.9e-6,
    0.01,
    0.5,
    1,
    1.0,
    -1,
    2,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    10**27,
    -(2**63) - 1,
    -(10**27),
    10**400,
    1e308,
    -1e308,
)
OTHERS: tuple[Any, ...] = (None, True, False, "", "1", "NaN", [], {}, [None], [2**64], {"1": 2**64})
EDGES = (*NUMBERS, *OTHERS)

# For each field a choice of what is legal, so that not every drawn body is refused.
SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "temperature": (0, -0.0, 5e-324, 1e-45, 9.9e-6, 1e-5, 0.7, 2),
    "top_p": (0, -0.0, 5e-324, 1e-45, 0.5, 1),
    "top_k": (-1, 0, 1, 22, 23, 2**31, 2**63 - 1),
    "min_p": (0, -0.0, 5e-324, 1e-45, 0.5, 1),
    "repetition_penalty": (0.01, 0.5, 1, 10),
    "frequency_penalty": (-2, -5e-324, -0.0, 1e-45, 2),
    "presence_penalty": (-2, -5e-324, -0.0, 1e-45, 2),
    "seed": (0, -1, 2**31, 2**63 - 1, -(2**63)),
    "min_tokens": (0, 1, 4),
    "logit_bias": ({}, {"0": -100, "22": 100}, {"5": 5e-324, "6": -0.0}, {str(i): -100 for i in range(23)}),
    "stop_token_ids": ([], [0, 5], list(range(22)), list(range(23))),
    "ignore_eos": (True, False),
}


def sampling_bodies() -> st.SearchStrategy[dict[str, Any]]:
    """Any combination of legal values."""
    return st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(values) for name, values in SAMPLING.items()}
    )


def mixed_bodies(fields: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Mostly legal values, and a few of ``fields`` with whatever JSON can say."""
    return st.tuples(
        sampling_bodies(), st.dictionaries(st.sampled_from(fields), st.sampled_from(EDGES), max_size=3)
    ).map(lambda drawn: {**drawn[0], **drawn[1]})
