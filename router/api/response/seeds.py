"""Seeds: from the one of a request to one of each of its choices."""

from __future__ import annotations

import hashlib
import struct

_LAYOUT = struct.Struct("<qQQ")  # fixed sizes and byte order: the same on every machine


def choice_seed(seed: int, prompt: int, choice: int) -> int:
    """The seed, from 0 to 2**63 - 1, of answer number ``choice`` to prompt number ``prompt`` of a request.

    ``seed`` is the request's, a signed 64-bit number. Taken from a hash, so that choices that differ in any
    of the three draw independently, those of neighbouring seeds included. It depends on nothing else: the
    same request has the same seeds in every process and release and on every machine.
    """
    digest = hashlib.sha256(_LAYOUT.pack(seed, prompt, choice)).digest()
    return int.from_bytes(digest[:8], "little") >> 1
