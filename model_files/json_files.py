"""Reads a model's JSON files into typed structs; an error names the file, the field and what is allowed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import msgspec

from cluster.errors import LeadoutError

T = TypeVar("T")

_PLACE = re.compile(r"^(?P<problem>.*) - at `\$\.?(?P<field>[^`]+)`$")


class ModelFileError(LeadoutError, ValueError):
    """A JSON file of a model cannot be read, or a field in it has a wrong type or value."""


def read_json(path: Path, kind: type[T]) -> T:
    """The content of ``path`` as ``kind``; fields that ``kind`` does not have are ignored.

    Raises ModelFileError.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise ModelFileError(f"{path}: {_with_field_first(str(error))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON: {error}") from None


def read_json_if_present(path: Path, kind: type[T]) -> T:
    """As ``read_json``; where there is no such file, ``kind`` with its defaults."""
    return read_json(path, kind) if path.is_file() else kind()


def _with_field_first(message: str) -> str:
    """``Expected `int`, got `str` - at `$.a.b``` becomes ``a.b: expected `int`, got `str```."""
    match = _PLACE.match(message)
    if match is None:
        return message[:1].lower() + message[1:]
    problem = match["problem"]
    return f"{match['field']}: {problem[:1].lower()}{problem[1:]}"
