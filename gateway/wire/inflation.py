"""Decompression within a limit and the memory budget.

No ratio bounds it: a tensor of zeros compresses a thousand times, and a limit must not depend on
what a tensor holds.
"""

from __future__ import annotations

import zlib

from modelport.gateway.runtime import offload, request_memory
from modelport.gateway.wire.raw_tensors import Buffer

#: Output between two checkpoints; zlib releases the interpreter lock.
_PIECE_BYTES = 256 * 1024
#: Content codings, with zlib's parameter.
WINDOW_BITS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}


class MalformedStream(Exception):
    """The bytes are not one complete stream of their coding."""


class DecompressedTooLarge(Exception):
    """The decompressed bytes exceed the limit."""


def inflate(content: Buffer, coding: bytes, limit_bytes: int) -> bytes:
    """Decompress ``content`` of ``coding``, one of ``WINDOW_BITS``, up to ``limit_bytes``.

    Raises:
        MalformedStream: ``content`` is not one complete stream.
        DecompressedTooLarge: It inflates to more than ``limit_bytes``.
    """
    inflater = zlib.decompressobj(WINDOW_BITS[coding])
    sent = memoryview(content)
    parts: list[bytes] = []
    size = at = 0
    rest: Buffer = b""
    try:
        while not inflater.eof:
            if not rest:  # in slices, because ``unconsumed_tail`` copies the rest of its input
                rest, at = sent[at : at + _PIECE_BYTES], at + _PIECE_BYTES
            part = inflater.decompress(rest, _PIECE_BYTES)
            rest = inflater.unconsumed_tail
            size += len(part)
            if size > limit_bytes:
                raise DecompressedTooLarge
            if part:
                request_memory.reserve(len(part))
                parts.append(part)
            elif not rest and at >= len(sent) and not inflater.eof:
                raise MalformedStream
            offload.checkpoint()
    except zlib.error as error:
        raise MalformedStream from error
    if inflater.unused_data or at < len(sent):
        raise MalformedStream
    return parts[0] if len(parts) == 1 else b"".join(parts)
