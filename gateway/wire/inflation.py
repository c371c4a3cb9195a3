"""Decompression within limits, and the limit for requests that expand to more than was sent.

Requests expand if they are compressed, if one value fills a tensor, if examples share a feature, or
if they hold an image. A model's signature bounds most of that. Anything else may expand to
``FREE_BYTES``, and beyond that to ``RATIO`` times what was sent: text and numbers compress 5 to 20
times, zeros a thousand times.
"""

from __future__ import annotations

import zlib

from modelport.gateway.runtime import offload, request_memory
from modelport.gateway.wire.raw_tensors import Buffer

FREE_BYTES = 8 * 1024 * 1024
RATIO = 100
#: Output between two checkpoints; zlib releases the interpreter lock.
_PIECE_BYTES = 256 * 1024
#: Content codings, with zlib's parameter.
WINDOW_BITS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}


class MalformedStream(Exception):
    """The bytes are not one complete stream of their coding."""


class DecompressedTooLarge(Exception):
    """The decompressed bytes exceed the limit."""


def limit(sent_bytes: int) -> int:
    """Return the size to which ``sent_bytes`` may expand if no signature bounds it."""
    return max(FREE_BYTES, RATIO * sent_bytes)


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
