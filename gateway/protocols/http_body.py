"""HTTP bodies: read within a limit, undo and apply content codings."""

from __future__ import annotations

import zlib

from gateway.errors import InvalidArgument, Unsupported
from gateway.protocols.asgi import Receive

#: Below this a compressed reply is hardly smaller, and costs more than it saves.
MIN_COMPRESSED_BYTES = 500


class Disconnected(Exception):
    """The client has gone before its request was complete."""


async def read(receive: Receive, limit: int, encoding: bytes = b"") -> bytes:
    """The request's body, without its content coding ``encoding``; never more than ``limit`` bytes.

    Raises:
        InvalidArgument: it is larger, or not of that coding.
        Unsupported: any coding but gzip and deflate.
        Disconnected: the client went away.
    """
    message = await receive()
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        chunks, size = [body], len(body)
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limit:
                break
        body = b"".join(chunks)
    if message["type"] == "http.disconnect":
        raise Disconnected
    if len(body) > limit:
        raise _too_large(limit)
    return _decompressed(body, encoding, limit) if encoding else body


def header_length(stated: bytes, size: int) -> int:
    """The size of a body's JSON part, as the client states it, of a body of ``size`` bytes.

    Raises:
        InvalidArgument: it is no number, or more than the body has.
    """
    length = int(stated) if stated.isdigit() and len(stated) < 20 else -1
    if not 0 <= length <= size:
        raise InvalidArgument(
            f"inference header size should be in range (0, {size}), got: "
            f"{stated[:64].decode('latin-1')}"
        )
    return length


def _too_large(limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"the request exceeds the maximum allowed input size of {limit} bytes. Use "
        "--http-max-input-size to increase the limit."
    )


def _decompressed(body: bytes, encoding: bytes, limit: int) -> bytes:
    coding = encoding.strip().lower()
    if coding == b"identity":
        return body
    if coding not in (b"gzip", b"deflate"):
        raise Unsupported(
            f"unsupported content-encoding '{encoding[:64].decode('latin-1')}'; use gzip or deflate"
        )
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | (16 if coding == b"gzip" else 0))
    try:
        plain = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise InvalidArgument(f"the body is not valid {coding.decode()} data") from error
    if len(plain) > limit:
        raise _too_large(limit)
    if not decompressor.eof or decompressor.unused_data:
        raise InvalidArgument(f"the body is not one complete {coding.decode()} stream")
    return plain


def compress(body: bytes, coding: bytes) -> bytes:
    compressor = zlib.compressobj(1, wbits=zlib.MAX_WBITS | (16 if coding == b"gzip" else 0))
    return compressor.compress(body) + compressor.flush()


def chosen_coding(header: bytes | None, size: int) -> bytes | None:
    """The coding for a reply of ``size`` bytes: what the client prefers of gzip and deflate.

    ``header`` is its ``Accept-Encoding`` (RFC 9110, 12.5.3).
    """
    if not header or size < MIN_COMPRESSED_BYTES:
        return None
    weights: dict[bytes, float] = {}
    for item in header.lower().split(b","):
        coding, _, parameter = item.partition(b";")
        name, _, value = parameter.partition(b"=")
        try:
            weights[coding.strip()] = float(value) if name.strip() == b"q" else 1.0
        except ValueError:
            weights[coding.strip()] = 0.0
    best = max((b"gzip", b"deflate"), key=lambda coding: weights.get(coding, 0.0))
    return best if weights.get(best, 0.0) > 0.0 else None
