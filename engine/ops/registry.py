"""The backends there are, by the names that the setting ``engine.backend`` has for them."""

from __future__ import annotations

import pkgutil
from types import MappingProxyType

from engine.ops.backend import Backend

# ``auto``'s first choice first. Imported when asked for: a backend may need a library that others do without.
_BACKENDS = MappingProxyType(
    {
        "cpu": "engine.ops.cpu:CpuBackend",
        "reference": "engine.ops.reference:ReferenceBackend",
    }
)
BACKEND_NAMES = tuple(_BACKENDS)


def backend_class(name: str) -> type[Backend]:
    """The backend called ``name``; for ``auto`` the first one that suits this machine.

    Raises ValueError for an unknown name, ImportError where the backend's library is missing.
    """
    if name == "auto":
        return next(each for each in map(_load, BACKEND_NAMES) if each.suits_this_machine())
    if name not in _BACKENDS:
        raise ValueError(f"backend {name!r} is unknown; known are auto, {', '.join(BACKEND_NAMES)}")
    return _load(name)


def _load(name: str) -> type[Backend]:
    found: type[Backend] = pkgutil.resolve_name(_BACKENDS[name])
    return found
