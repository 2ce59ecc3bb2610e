"""``Content-Encoding`` of request bodies: gzip and deflate, decoded piece by piece within a bound."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from router.api.errors import ApiError, bad_request

_PIECE = 65_536  # bytes decoded at a time; a kilobyte of gzip may be a megabyte of text
_ALLOWED = "gzip, deflate, identity"


class BodyDecoder:
    """Decodes one body. ``encoding`` is the header's value. Raises ApiError (415) for an unknown one."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding.strip().lower()
        self._stream: zlib._Decompress | None = None
        if self._encoding in ("gzip", "x-gzip"):
            self._stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
        elif self._encoding not in ("", "identity", "deflate"):
            raise ApiError(
                415,
                f"The Content-Encoding {encoding[:100]!r} is not supported. Supported are: {_ALLOWED}.",
                param="Content-Encoding",
                code="unsupported_content_encoding",
                headers={"Accept-Encoding": _ALLOWED},
            )

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What ``data``, the next part of the body, is decoded to, in pieces of bounded size.

        Raises ApiError (400) if it cannot be decoded.
        """
        if self._encoding in ("", "identity"):
            yield data
            return
        if not data:
            return
        if self._stream is None:
            # "deflate" is the zlib format, but some clients send the bare stream; zlib's first byte tells.
            self._stream = zlib.decompressobj(zlib.MAX_WBITS if data[0] & 0x0F == 8 else -zlib.MAX_WBITS)
        is_full = True
        while data or is_full:  # a full piece may have left more behind
            try:
                piece = self._stream.decompress(data, _PIECE)
            except zlib.error as error:
                raise self._broken(str(error)) from error
            if self._stream.unused_data:
                raise self._broken("there is data after its end")
            yield piece
            data = self._stream.unconsumed_tail
            is_full = len(piece) == _PIECE

    def finish(self) -> None:
        """The body has ended. Raises ApiError (400) if the encoded stream has not."""
        if self._encoding not in ("", "identity") and (self._stream is None or not self._stream.eof):
            raise self._broken("it ends before its end")

    def _broken(self, why: str) -> ApiError:
        return bad_request(
            f"The body is not valid {self._encoding}, as its Content-Encoding says: {why}.",
            "Content-Encoding",
            "invalid_content_encoding",
        )
