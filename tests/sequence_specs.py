"""What tests say of a message's sequence among its other fields."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.sequence_spec import SequenceSpec

_NAMES = frozenset(field.name for field in msgspec.structs.fields(SequenceSpec))


def with_spec(fields: dict[str, Any]) -> dict[str, Any]:
    """``fields``, those of a ``SequenceSpec`` put together under ``spec``."""
    spec = SequenceSpec(**{name: value for name, value in fields.items() if name in _NAMES})
    return {"spec": spec} | {name: value for name, value in fields.items() if name not in _NAMES}
