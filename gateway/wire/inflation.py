"""Compressed bytes → plain bytes, within limits; and the limits of whatever a few bytes stand for.

A request's bytes may stand for more: compressed ones, one value that fills a tensor, a feature that
all examples share, a picture. A model's signature bounds most of that. Past ``FREE_BYTES`` what the
signature leaves open may be ``RATIO`` times what was sent: text and numbers compress to a fifth or
a twentieth, and what is all zeros, to a thousandth, has ``FREE_BYTES``.
"""

from __future__ import annotations

import zlib

from modelport.gateway.runtime import offload, request_memory
from modelport.gateway.wire.raw import Buffer

FREE_BYTES = 8 * 1024 * 1024
RATIO = 100
#: Made in one piece; zlib does not hold the interpreter's lock meanwhile.
_PIECE_BYTES = 256 * 1024
#: Content codings, as ``zlib`` takes them.
WINDOW_BITS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}


class Malformed(Exception):
    """The bytes are not one complete stream of that coding."""


class TooLarge(Exception):
    """What the bytes stand for is larger than the limit."""


def limit(sent_bytes: int) -> int:
    """How much ``sent_bytes`` may stand for, where nothing else bounds it."""
    return max(FREE_BYTES, RATIO * sent_bytes)


def inflate(content: Buffer, coding: bytes, limit_bytes: int) -> bytes:
    """``content`` without its ``coding``, one of ``WINDOW_BITS``.

    Raises:
        Malformed, TooLarge: as they say; nothing is inflated past ``limit_bytes``.
    """
    inflater = zlib.decompressobj(WINDOW_BITS[coding])
    sent = memoryview(content)
    parts: list[bytes] = []
    size = at = 0
    rest: Buffer = b""
    try:
        while not inflater.eof:
            if not rest:  # of all at once, every part would copy what is left
                rest, at = sent[at : at + _PIECE_BYTES], at + _PIECE_BYTES
            part = inflater.decompress(rest, _PIECE_BYTES)
            rest = inflater.unconsumed_tail
            size += len(part)
            if size > limit_bytes:
                raise TooLarge
            if part:
                request_memory.reserve(len(part))
                parts.append(part)
            elif not rest and at >= len(sent) and not inflater.eof:
                raise Malformed
            offload.checkpoint()
    except zlib.error as error:
        raise Malformed from error
    if inflater.unused_data or at < len(sent):
        raise Malformed
    return parts[0] if len(parts) == 1 else b"".join(parts)
