"""Reads the GGUF container: metadata and a table of tensors, the tensor data left in the memory map.

A GGUF file is, all little endian: magic ``GGUF``, u32 version, u64 tensor count, u64 metadata count, the
metadata (key, value type, value), the tensor table (name, dimensions with the contiguous one first, type id,
offset), padding to ``general.alignment``, then the tensor data. Strings are a u64 length and UTF-8 bytes.

Nothing in the file is trusted: every count and length is compared with the bytes left before it is used, so
the memory a corrupt file can ask for is bounded by its size, and it ends in :class:`GgufFormatError`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Self, TypeAlias

from cluster.errors import LeadoutError

GgufScalar: TypeAlias = bool | int | float | str
GgufValue: TypeAlias = GgufScalar | list["GgufValue"]

DEFAULT_ALIGNMENT = 32  # bytes, where the file has no general.alignment
SUPPORTED_VERSIONS = (2, 3)

_MAX_DIMENSIONS = 4
_MAX_ARRAY_DEPTH = 4
_MAX_DIMENSION = 2**48  # elements; far above any model, keeps products of four in plain range checks
_MAX_KEY_BYTES = 65_535
_MAX_ALIGNMENT = 2**20


class GgufFormatError(LeadoutError, ValueError):
    """The file is not a GGUF file this parser reads; the message names the place and what was expected."""


class GgufTensorType(NamedTuple):
    """How one tensor type is stored: rows are cut into blocks of equal size."""

    name: str
    block_elements: int
    block_bytes: int


TENSOR_TYPES: Mapping[int, GgufTensorType] = MappingProxyType(
    {
        0: GgufTensorType("F32", 1, 4),
        1: GgufTensorType("F16", 1, 2),
        2: GgufTensorType("Q4_0", 32, 18),
        3: GgufTensorType("Q4_1", 32, 20),
        6: GgufTensorType("Q5_0", 32, 22),
        7: GgufTensorType("Q5_1", 32, 24),
        8: GgufTensorType("Q8_0", 32, 34),
        10: GgufTensorType("Q2_K", 256, 84),
        11: GgufTensorType("Q3_K", 256, 110),
        12: GgufTensorType("Q4_K", 256, 144),
        13: GgufTensorType("Q5_K", 256, 176),
        14: GgufTensorType("Q6_K", 256, 210),
        24: GgufTensorType("I8", 1, 1),
        25: GgufTensorType("I16", 1, 2),
        26: GgufTensorType("I32", 1, 4),
        27: GgufTensorType("I64", 1, 8),
        28: GgufTensorType("F64", 1, 8),
        30: GgufTensorType("BF16", 1, 2),
    }
)

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: Mapping[int, str] = MappingProxyType(  # metadata value type id -> struct format
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
)


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table.

    ``shape`` is row-major (the file's dimensions reversed): ``shape[-1]`` is contiguous. ``offset`` is in
    bytes from the start of the file; ``num_bytes`` is the stored (possibly quantised) size.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    offset: int
    num_bytes: int


class _Cursor:
    """A read position in the mapped file; every read is checked against the end of the file."""

    def __init__(self, buffer: mmap.mmap, size: int, path: Path) -> None:
        self.buffer = buffer
        self.size = size
        self.path = path
        self.position = 0

    def error(self, problem: str) -> GgufFormatError:
        return GgufFormatError(f"{self.path}: {problem} (at byte {self.position:,} of {self.size:,})")

    def require(self, count: int, bytes_each: int, what: str) -> None:
        """Refuses when ``count`` items of at least ``bytes_each`` bytes cannot be in the rest of the file."""
        if count * bytes_each > self.size - self.position:
            raise self.error(
                f"truncated or corrupt: {what} needs at least {count * bytes_each:,} more bytes, "
                f"{self.size - self.position:,} are left"
            )

    def u32(self, what: str) -> int:
        self.require(1, 4, what)
        value: int = _U32.unpack_from(self.buffer, self.position)[0]
        self.position += 4
        return value

    def u64(self, what: str) -> int:
        self.require(1, 8, what)
        value: int = _U64.unpack_from(self.buffer, self.position)[0]
        self.position += 8
        return value

    def string(self, what: str) -> str:
        length = self.u64(what)
        self.require(length, 1, what)
        start = self.position
        self.position += length
        try:
            return str(self.buffer[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not valid UTF-8: {error}") from None

    def string_array(self, count: int, what: str) -> list[str]:
        """``count`` strings. One flat loop: a tokenizer has 100,000 of them."""
        self.require(count, 8, what)
        buffer, size, position, unpack = self.buffer, self.size, self.position, _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                if start > size:
                    raise self.error(f"{what}: the file ends inside element {len(strings)}")
                position = start + unpack(buffer, position)[0]
                if position > size:
                    raise self.error(f"{what}: the file ends inside element {len(strings)}")
                strings.append(str(buffer[start:position], "utf-8"))
        except UnicodeDecodeError as error:
            raise self.error(f"{what}: element {len(strings)} is not valid UTF-8: {error}") from None
        self.position = position
        return strings

    def numbers(self, type_id: int, count: int, what: str) -> list[GgufValue]:
        item_bytes = struct.calcsize("<" + _NUMBERS[type_id])
        self.require(count, item_bytes, what)
        values = struct.unpack_from(f"<{count}{_NUMBERS[type_id]}", self.buffer, self.position)
        self.position += count * item_bytes
        return list(values)

    def booleans(self, count: int, what: str) -> list[GgufValue]:
        self.require(count, 1, what)
        raw = self.buffer[self.position : self.position + count]
        if raw.strip(b"\0\1"):
            raise self.error(f"{what} is a boolean; its byte must be 0 or 1")
        self.position += count
        return [byte == 1 for byte in raw]

    def value(self, what: str) -> GgufValue:
        type_id = self.u32(what)
        if type_id == _STRING:
            return self.string(what)
        if type_id == _ARRAY:
            return self.array(what, depth=1)
        if type_id == _BOOL:
            return self.booleans(1, what)[0]
        if type_id in _NUMBERS:
            return self.numbers(type_id, 1, what)[0]
        raise self.error(f"{what} has the unknown value type {type_id}; known are 0 to 12")

    def array(self, what: str, depth: int) -> list[GgufValue]:
        if depth > _MAX_ARRAY_DEPTH:
            raise self.error(f"{what} nests arrays more than {_MAX_ARRAY_DEPTH} deep")
        item_type = self.u32(what)
        count = self.u64(what)
        if item_type == _STRING:
            return list(self.string_array(count, what))
        if item_type == _BOOL:
            return self.booleans(count, what)
        if item_type in _NUMBERS:
            return self.numbers(item_type, count, what)
        if item_type == _ARRAY:
            self.require(count, 12, what)
            return [self.array(what, depth + 1) for _ in range(count)]
        raise self.error(f"{what} is an array of the unknown value type {item_type}; known are 0 to 12")


class GgufFile:
    """An open GGUF file: ``metadata`` and ``tensors`` are read at once, tensor data stays in the memory map.

    Use it as a context manager or call :meth:`close`. ``tensors`` is in file order. ``header_bytes`` is the
    size of all before the tensor data (magic to tensor table, no padding), ``num_bytes`` that of the file.
    """

    def __init__(self, path: Path, mapped: mmap.mmap, num_bytes: int) -> None:
        """Parses ``mapped``; use :meth:`open`. Raises GgufFormatError."""
        self.path = path
        self.num_bytes = num_bytes
        self._mapped: mmap.mmap | None = mapped
        cursor = _Cursor(mapped, num_bytes, path)
        self.version, tensor_count, metadata_count = _read_counts(cursor)
        self.metadata: dict[str, GgufValue] = _read_metadata(cursor, metadata_count)
        self.alignment = _alignment(cursor, self.metadata)
        self.tensors: dict[str, GgufTensor] = _read_tensor_table(cursor, tensor_count, self.alignment)
        self.header_bytes = cursor.position

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Maps and parses the file. Raises GgufFormatError, or OSError where the file cannot be opened."""
        path = Path(path)
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes == 0:
                raise GgufFormatError(f"{path}: the file is empty")
            mapped = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ)
        try:
            return cls(path, mapped, num_bytes)
        except BaseException:
            mapped.close()
            raise

    def _map(self) -> mmap.mmap:
        if self._mapped is None:
            raise ValueError(f"{self.path}: the file is closed")
        return self._mapped

    def data(self, name: str) -> memoryview:
        """The stored bytes of tensor ``name``, read-only, without a copy. Raises KeyError with the name.

        The view keeps the mapping alive, also after :meth:`close`.
        """
        if name not in self.tensors:
            raise KeyError(f"{self.path}: no tensor named {name!r}")
        tensor = self.tensors[name]
        return memoryview(self._map())[tensor.offset : tensor.offset + tensor.num_bytes]

    def read(self, offset: int, num_bytes: int) -> bytes:
        """A copy of up to ``num_bytes`` bytes of the file from ``offset``; shorter at the end of the file."""
        return self._map()[offset : offset + num_bytes]

    def close(self) -> None:
        """Gives the mapping up; where views from :meth:`data` are alive, it goes with the last of them."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            # Refused by mmap while a view is alive: a view that loses its memory would crash the process.
            with contextlib.suppress(BufferError):
                mapped.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _read_counts(cursor: _Cursor) -> tuple[int, int, int]:
    """Reads the fixed header: version, tensor count, metadata count."""
    cursor.require(1, 4, "the magic")
    magic = cursor.buffer[:4]
    if magic != b"GGUF":
        raise cursor.error(f"not a GGUF file: it starts with {magic!r}, not b'GGUF'")
    cursor.position = 4
    version = cursor.u32("the version")
    if version not in SUPPORTED_VERSIONS:
        if version & 0xFFFF == 0:
            raise cursor.error("the file is big endian; only little endian is read")
        raise cursor.error(f"GGUF version {version} is not read; allowed are {SUPPORTED_VERSIONS}")
    tensor_count = cursor.u64("the tensor count")
    metadata_count = cursor.u64("the metadata count")
    cursor.require(metadata_count, 13, f"a metadata count of {metadata_count:,}")  # empty key, type, one byte
    cursor.require(
        tensor_count, 24, f"a tensor count of {tensor_count:,}"
    )  # empty name, no dimensions, type, offset
    return version, tensor_count, metadata_count


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, GgufValue]:
    metadata: dict[str, GgufValue] = {}
    for index in range(count):
        key = cursor.string(f"the name of metadata entry {index}")
        if not key or len(key.encode()) > _MAX_KEY_BYTES:
            raise cursor.error(
                f"metadata entry {index} has a name of {len(key.encode()):,} bytes; 1 to 65,535 allowed"
            )
        if key in metadata:
            raise cursor.error(f"the metadata key {key!r} appears twice")
        metadata[key] = cursor.value(f"metadata {key!r}")
    return metadata


def _alignment(cursor: _Cursor, metadata: dict[str, GgufValue]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        type(alignment) is not int  # a bool is an int, too
        or not 8 <= alignment <= _MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise cursor.error(f"general.alignment is {alignment!r}; it must be a power of two of at least 8")
    return alignment


def _read_tensor_table(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    relative: dict[str, GgufTensor] = {}  # offsets still relative to the start of the data
    for index in range(count):
        tensor = _read_tensor(cursor, index, alignment)
        if tensor.name in relative:
            raise cursor.error(f"the tensor {tensor.name!r} appears twice")
        relative[tensor.name] = tensor
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in relative.items():
        offset = data_start + tensor.offset
        if offset + tensor.num_bytes > cursor.size:
            raise cursor.error(
                f"the tensor {name!r} lies at bytes {offset:,} to {offset + tensor.num_bytes:,}, "
                "which is outside the file"
            )
        tensors[name] = GgufTensor(
            name, tensor.shape, tensor.type_id, tensor.type_name, offset, tensor.num_bytes
        )
    _refuse_overlaps(cursor, tensors)
    return tensors


def _read_tensor(cursor: _Cursor, index: int, alignment: int) -> GgufTensor:
    name = cursor.string(f"the name of tensor {index}")
    num_dimensions = cursor.u32(f"tensor {name!r}")
    if num_dimensions > _MAX_DIMENSIONS:
        raise cursor.error(
            f"the tensor {name!r} has {num_dimensions} dimensions; at most {_MAX_DIMENSIONS} allowed"
        )
    shape = tuple(reversed([cursor.u64(f"tensor {name!r}") for _ in range(num_dimensions)]))
    type_id = cursor.u32(f"tensor {name!r}")
    offset = cursor.u64(f"tensor {name!r}")
    if type_id not in TENSOR_TYPES:
        known = ", ".join(f"{known_id} ({known_type.name})" for known_id, known_type in TENSOR_TYPES.items())
        raise cursor.error(
            f"the tensor {name!r} has the unsupported type id {type_id}; supported are {known}"
        )
    if any(dimension > _MAX_DIMENSION for dimension in shape):
        raise cursor.error(f"the tensor {name!r} has the impossible shape {shape}")
    tensor_type = TENSOR_TYPES[type_id]
    row_elements = shape[-1] if shape else 1
    if row_elements % tensor_type.block_elements:
        raise cursor.error(
            f"the tensor {name!r} has rows of {row_elements} elements; {tensor_type.name} needs a multiple "
            f"of {tensor_type.block_elements}"
        )
    if offset % alignment:
        raise cursor.error(f"the tensor {name!r} has the offset {offset}, not a multiple of {alignment}")
    num_elements = 1
    for dimension in shape:
        num_elements *= dimension
    num_bytes = num_elements // tensor_type.block_elements * tensor_type.block_bytes
    return GgufTensor(name, shape, type_id, tensor_type.name, offset, num_bytes)


def _refuse_overlaps(cursor: _Cursor, tensors: dict[str, GgufTensor]) -> None:
    previous: GgufTensor | None = None
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if previous is not None and previous.offset + previous.num_bytes > tensor.offset:
            raise cursor.error(f"the tensors {previous.name!r} and {tensor.name!r} share bytes of the file")
        previous = tensor
