"""Compressed request bodies: decoded within the bound, refused by name, and never silently wrong."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from router.api.errors import ApiError
from router.api.request.content_encoding import _PIECE, BodyDecoder
from tests.router.conftest import MODEL, StartRouter
from tests.router.scripted_worker import ScriptedWorker, answer


def _raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


ENCODERS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("GZIP", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", _raw_deflate),
    ("identity", bytes),
    ("", bytes),
]


def _decode(encoding: str, chunks: list[bytes]) -> bytes:
    decoder = BodyDecoder(encoding)
    pieces = [piece for chunk in chunks for piece in decoder.feed(chunk)]
    decoder.finish()
    if encoding not in ("", "identity"):
        assert all(len(piece) <= _PIECE for piece in pieces)
    return b"".join(pieces)


@given(st.sampled_from(ENCODERS), st.binary(max_size=2000), st.integers(0, 200), st.integers(1, 500))
def test_any_body_in_any_chunks(
    encoder: tuple[str, Callable[[bytes], bytes]], unit: bytes, times: int, size: int
) -> None:
    encoding, encode = encoder
    body = unit * times
    encoded = encode(body)
    chunks = [encoded[start : start + size] for start in range(0, len(encoded), size)]
    assert _decode(encoding, chunks) == body


@given(st.sampled_from(["gzip", "deflate"]), st.binary(max_size=200))
def test_what_is_not_encoded_so_is_refused(encoding: str, data: bytes) -> None:
    assume(encoding == "gzip" or not _is_deflate(data))
    with pytest.raises(ApiError) as caught:
        _decode(encoding, [data])
    error = caught.value
    assert (error.status, error.param, error.code) == (400, "Content-Encoding", "invalid_content_encoding")


def _is_deflate(data: bytes) -> bool:
    """A few bytes may well be a whole raw stream."""
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        stream.decompress(data)
    except zlib.error:
        return False
    return stream.eof


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (gzip.compress(b"hello")[:-3], "it ends before its end"),
        (b"", "it ends before its end"),
        (gzip.compress(b"hello") + b"more", "there is data after its end"),
        (gzip.compress(b"hello")[:-8] + b"\0" * 8, "incorrect data check"),
        (b'{"model": "x"}', "incorrect header check"),
    ],
    ids=["cut off", "empty", "continued", "wrong checksum", "plain"],
)
def test_broken_gzip_is_named(data: bytes, why: str) -> None:
    with pytest.raises(ApiError, match=why):
        _decode("gzip", [data])


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "deflate,gzip", "nonsense"])
def test_other_encodings_are_refused_by_name(encoding: str) -> None:
    with pytest.raises(ApiError) as caught:
        BodyDecoder(encoding)
    assert caught.value.status == 415
    assert f"'{encoding}'" in caught.value.message
    assert caught.value.headers() == {"Accept-Encoding": "gzip, deflate, identity"}


@pytest.mark.parametrize(("encoding", "encode"), ENCODERS)
async def test_a_compressed_request_is_answered(
    start_router: StartRouter,
    make_worker: Callable[..., ScriptedWorker],
    encoding: str,
    encode: Callable[[bytes], bytes],
) -> None:
    router = await start_router(make_worker("d0", script=answer([5, 6], finish_reason="length")))
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 2}).encode()
    response = await router.http.post(
        "/v1/completions", content=encode(body), headers={"Content-Encoding": encoding}
    )
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 2


async def test_a_bomb_is_stopped_at_the_bound(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await start_router(max_request_body=200_000)
    num_decoded = 0
    feed = BodyDecoder.feed

    def counting(decoder: BodyDecoder, data: bytes):  # type: ignore[no-untyped-def]
        nonlocal num_decoded
        for piece in feed(decoder, data):
            num_decoded += len(piece)
            yield piece

    monkeypatch.setattr(BodyDecoder, "feed", counting)
    bomb = gzip.compress(b" " * 100_000_000)
    assert len(bomb) < 200_000
    response = await router.http.post("/v1/completions", content=bomb, headers={"Content-Encoding": "gzip"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert num_decoded <= 200_000 + _PIECE


async def test_an_unknown_encoding_is_refused_before_the_body(start_router: StartRouter) -> None:
    router = await start_router()
    response = await router.http.post("/v1/completions", content=b"x", headers={"Content-Encoding": "br"})
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "gzip, deflate, identity"
    assert response.json()["error"]["param"] == "Content-Encoding"


async def test_a_body_beyond_the_bound_is_answered_while_it_is_sent(start_router: StartRouter) -> None:
    """The client is in the middle of its body, and must be able to read why that was refused."""
    router = await start_router(max_request_body=100_000)
    response = await router.http.post("/v1/completions", content=b" " * 30_000_000)
    assert response.status_code == 413
    assert response.headers["connection"] == "close"
