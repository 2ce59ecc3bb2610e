"""The value types of the configuration that are more than a number or a word: sizes, URLs, names."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
SIZE_FORMS = "a number of bytes like 1048576, or a size with a unit B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
_HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.IGNORECASE)
_REGISTRY_SCHEMES = ("redis", "rediss", "unix")
REGISTRY_URL_FORMS = "redis://host:port/db, rediss://host:port/db or unix:///path/to/socket"


def parse_size(value: object) -> int:
    """Bytes of ``"512MiB"``, ``"1.5 GB"`` or a plain integer. Raises ValueError that says what is allowed."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        unit = _UNITS.get(match[2].lower())
        if unit is not None:
            return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    raise ValueError(f"must be {SIZE_FORMS}")


def format_size(num_bytes: int) -> str:
    """``num_bytes`` with the largest binary unit that divides it, such that parse_size gives it back."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes and num_bytes % _UNITS[unit.lower()] == 0:
            return f"{num_bytes // _UNITS[unit.lower()]}{unit}"
    return str(num_bytes)


def mask_password(url: str) -> str:
    """``url`` with its password, if it has one, replaced by ``***``: for logs and errors."""
    url = re.sub(r"(//[^/@:]*:).*(@)", r"\1***\2", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", url)


def _registry_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises on a port that is no number
    except ValueError as error:
        raise ValueError(f"must be {REGISTRY_URL_FORMS} ({error})") from None
    has_place = bool(parts.path.strip("/")) if parts.scheme == "unix" else bool(parts.hostname)
    if parts.scheme not in _REGISTRY_SCHEMES or not has_place:
        raise ValueError(f"must be {REGISTRY_URL_FORMS}")
    return url


def _origin(origin: str) -> str:
    allowed = (
        "must be an origin as browsers send it, like https://chat.example.com or http://localhost:3000, or *"
    )
    if origin == "*":
        return origin
    try:
        parts = urlsplit(origin)
        _ = parts.port  # raises on a port that is no number
    except ValueError as error:
        raise ValueError(f"{allowed} ({error})") from None
    if not parts.hostname or origin != f"{parts.scheme}://{parts.netloc}" or "@" in parts.netloc:
        raise ValueError(allowed)
    return origin.lower()


def _host_pattern(host: str) -> str:
    if host != "*" and not _HOST.fullmatch(host):
        raise ValueError("must be a host's name without a port, *.name for all below it, or *")
    return host.lower()


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two from 8 to 256")
    return value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _split_commas(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    return value


ByteSize = Annotated[
    int,
    Field(ge=1),
    BeforeValidator(parse_size),
    WithJsonSchema({"type": ["integer", "string"], "format": "byte-size", "description": SIZE_FORMS}),
]
BlockSize = Annotated[
    int,
    AfterValidator(_power_of_two),
    Field(ge=8, le=256, json_schema_extra={"enum": [8, 16, 32, 64, 128, 256]}),
]
RegistryUrl = Annotated[
    str, AfterValidator(_registry_url), Field(json_schema_extra={"format": "registry-url"})
]
Origin = Annotated[str, AfterValidator(_origin)]
HostPattern = Annotated[str, AfterValidator(_host_pattern)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
NonEmpty = Annotated[str, Field(min_length=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
PortOrOff = Annotated[int, Field(ge=-1, le=65535)]
Milliseconds = Annotated[int, Field(ge=1, le=86_400_000)]
LowerCase = BeforeValidator(_lower)
CommaSeparated = BeforeValidator(_split_commas)
