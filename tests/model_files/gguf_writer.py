"""Writes small GGUF files for tests."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

STRING, ARRAY = 8, 9


def encode_string(text: str | bytes) -> bytes:
    """A GGUF string: u64 length and bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def encode_value(value: object) -> bytes:
    """Value type id and value: bool, int (u32 where it fits, else i64), float (f32), str, or a list."""
    type_id, payload = _type_and_payload(value)
    return struct.pack("<I", type_id) + payload


def _type_and_payload(value: object) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, bytes([value])
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if 0 <= value < 2**32 else (11, struct.pack("<q", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return STRING, encode_string(value)
    if isinstance(value, list):
        items = [_type_and_payload(item) for item in value]
        types = {type_id for type_id, _ in items} or {4}
        if len(types) > 1:
            raise ValueError(f"a GGUF array has one item type, not {sorted(types)}: {value[:8]}")
        return ARRAY, struct.pack("<IQ", types.pop(), len(items)) + b"".join(payload for _, payload in items)
    raise TypeError(f"no GGUF value type for {value!r}")


def gguf_bytes(
    metadata: Mapping[str, object],
    tensors: Mapping[str, tuple[tuple[int, ...], int, bytes]],
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """The file's bytes. ``tensors``: name -> (row-major shape, type id, stored bytes)."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += encode_string(key) + encode_value(value)
    offset = 0
    for name, (shape, type_id, data) in tensors.items():
        out += encode_string(name) + struct.pack("<I", len(shape))
        out += b"".join(struct.pack("<Q", dimension) for dimension in reversed(shape))
        out += struct.pack("<IQ", type_id, offset)
        offset += -(-len(data) // alignment) * alignment
    for _, _, data in tensors.values():
        out += b"\0" * (-len(out) % alignment)
        out += data
    return bytes(out)


def write_gguf(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Mapping[str, tuple[tuple[int, ...], int, bytes]],
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Writes the file, returns its path. An ``alignment`` other than 32 belongs into ``metadata``, too."""
    path.write_bytes(gguf_bytes(metadata, tensors, version=version, alignment=alignment))
    return path
