"""Reads a model's JSON files into typed structs; an error names the file, the field and what is allowed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import msgspec

from cluster.errors import LeadoutError

T = TypeVar("T")

_SHOWN = 80  # characters of a wrong value
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")  # an index in brackets, or a name
_PLACE = re.compile(r"^(?P<problem>.*) - at `\$\.?(?P<field>[^`]+)`$")


class ModelFileError(LeadoutError, ValueError):
    """A JSON file of a model cannot be read, or a field in it has a wrong type or value."""


def read_json(path: Path, kind: type[T]) -> T:
    """The content of ``path`` as ``kind``; fields that ``kind`` does not have are ignored.

    Raises ModelFileError.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise ModelFileError(f"{path}: {_explained(str(error), content)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON: {error}") from None


def read_json_if_present(path: Path, kind: type[T]) -> T:
    """As ``read_json``; where there is no such file, ``kind`` with its defaults."""
    return read_json(path, kind) if path.is_file() else kind()


def _explained(message: str, content: bytes) -> str:
    """msgspec's message with the field first, and with its value."""
    match = _PLACE.match(message)
    if match is None:
        return message[:1].lower() + message[1:]
    field, problem = match["field"], match["problem"][:1].lower() + match["problem"][1:]
    try:
        value = msgspec.json.decode(content)
        for index, name in _STEP.findall(field):
            value = value[int(index)] if index else value[name]
    except (msgspec.DecodeError, KeyError):  # no JSON further on, or `[...]` for a key that is not said
        return f"{field}: {problem}"
    return f"{field} is {msgspec.json.encode(value).decode()[:_SHOWN]}: {problem}"
