"""Parts of an HTTP request: body, deadline and content codings, within limits."""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Mapping
from types import MappingProxyType

from modelport.gateway.errors import InvalidArgument, Unsupported
from modelport.gateway.protocols.asgi import Receive
from modelport.gateway.runtime import offload
from modelport.gateway.types import NO_DEADLINE, Deadline
from modelport.gateway.wire import inflation
from modelport.gateway.wire.raw_tensors import Buffer

#: Smaller responses are not compressed.
MIN_COMPRESSED_BYTES = 500
#: Small bodies that inflate to at most this size are inflated on the event loop.
INFLATED_INLINE_BYTES = 256 * 1024
#: Size limit of requests without tensors.
CONTROL_BYTES = 256 * 1024
#: Length of the JSON part of a body that also has binary tensors (Triton's extension).
HEADER_LENGTH = b"inference-header-content-length"
_NOT_JSON = {b"content-encoding", HEADER_LENGTH}


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete."""


async def read(
    receive: Receive,
    headers: Mapping[bytes, bytes],
    limit: int,
    deadline: Deadline = NO_DEADLINE,
    bound: int | None = None,
) -> bytes:
    """Receive the request's body and undo its content coding.

    Args:
        headers: The request's headers, names in lower case.
        limit: Size limit, before and after decompression.
        bound: Size limit of a valid body by the model's signature, or None.

    Raises:
        InvalidArgument: The body is too large, or does not have its stated coding.
        Unsupported: The coding is neither gzip nor deflate.
        TimedOut: The deadline has passed.
        ClientDisconnected: The client disconnected.
    """
    most = limit if bound is None else min(limit, bound)
    message = await receive()
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        stated = headers.get(b"content-length", b"")
        size = max(len(body), int(stated) if stated.isdigit() and len(stated) < 20 else 0)
        chunks, size = [body], size if size > most else len(body)
        while message.get("more_body") and size <= most:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
        if size > most:
            raise _too_large(most, limit, headers, size)
        body = b"".join(chunks)
    if message["type"] == "http.disconnect":
        raise ClientDisconnected
    if len(body) > most:
        raise _too_large(most, limit, headers, len(body))
    encoding = headers.get(b"content-encoding")
    if not encoding or encoding.strip().lower() == b"identity":
        return body
    return await _inflated(body, encoding, limit, deadline, bound)


async def read_control(
    receive: Receive,
    headers: Mapping[bytes, bytes] = MappingProxyType({}),
    size: int = CONTROL_BYTES,
) -> bytes:
    """Receive the body of a request without tensors, as ``read``; no option raises ``size``."""
    return await read(receive, headers, sys.maxsize, bound=size)


def header_length(stated: bytes, size: int) -> int:
    """Parse the stated size of the JSON part of a body of ``size`` bytes.

    Raises:
        InvalidArgument: It is not a number, or exceeds ``size``.
    """
    length = int(stated) if stated.isdigit() and len(stated) < 20 else -1
    if not 0 <= length <= size:
        raise InvalidArgument(
            f"inference header size should be in range (0, {size}), got: "
            f"{stated[:64].decode('latin-1')}"
        )
    return length


def _too_large(most: int, limit: int, headers: Mapping[bytes, bytes], size: int) -> InvalidArgument:
    """Make the error in Triton's words, which differ for JSON and other bodies."""
    if most < limit:
        return InvalidArgument(
            f"the request is larger than {most} bytes, but no valid request of its kind is so large"
        )
    subject = f"request JSON size of {size} bytes exceeds the maximum allowed input size"
    if headers.keys() & _NOT_JSON:
        subject = "request size exceeds the maximum allowed value"
    return InvalidArgument(
        f"{subject} of {limit} bytes. Use --http-max-input-size to increase the limit."
    )


async def _inflated(
    body: bytes, encoding: bytes, limit: int, deadline: Deadline, bound: int | None
) -> bytes:
    coding = encoding.strip().lower()
    if coding not in inflation.WINDOW_BITS:
        raise Unsupported(
            f"unsupported content-encoding '{encoding[:64].decode('latin-1')}'; use gzip or deflate"
        )
    most = limit if bound is None else min(limit, bound)
    try:
        if len(body) <= offload.INLINE_BYTES:
            with contextlib.suppress(inflation.DecompressedTooLarge):
                return inflation.inflate(body, coding, min(most, INFLATED_INLINE_BYTES))
        return await offload.run(lambda: inflation.inflate(body, coding, most), deadline)
    except inflation.MalformedStream as error:
        raise InvalidArgument(f"the body is not one complete {coding.decode()} stream") from error
    except inflation.DecompressedTooLarge:
        raise _too_large(most, limit, {b"content-encoding": coding}, most) from None


async def compress(body: Buffer, coding: bytes) -> bytes:
    def work() -> bytes:
        compressor = zlib.compressobj(1, wbits=inflation.WINDOW_BITS[coding])
        return compressor.compress(body) + compressor.flush()

    return work() if len(body) <= offload.PIECE_BYTES else await offload.run(work)


def chosen_coding(header: bytes | None, size: int) -> bytes | None:
    """Choose gzip, deflate or no coding for a response of ``size`` bytes.

    ``header`` is the request's ``Accept-Encoding`` (RFC 9110, 12.5.3).
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
