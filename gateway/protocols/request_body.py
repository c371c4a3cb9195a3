"""Parts of an HTTP request: body, deadline and content codings, within limits."""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING

from modelport.gateway.errors import InvalidArgument, Unsupported
from modelport.gateway.protocols.asgi import REQUEST
from modelport.gateway.protocols.http_message import Answer, HttpRequest, HttpResponse
from modelport.gateway.runtime import offload
from modelport.gateway.types import NO_DEADLINE, Deadline
from modelport.gateway.wire import inflation
from modelport.gateway.wire.raw_tensors import Buffer

if TYPE_CHECKING:
    from fastapi import Request

#: Smaller responses are not compressed.
MIN_COMPRESSED_BYTES = 500
#: Small bodies that inflate to at most this size are inflated on the event loop.
INFLATED_INLINE_BYTES = 256 * 1024
#: Size limit of requests without tensors.
CONTROL_BYTES = 256 * 1024
#: Length of the JSON part of a body that also has binary tensors (Triton's extension).
HEADER_LENGTH = b"inference-header-content-length"


def take(
    request: HttpRequest, limit: int, deadline: Deadline = NO_DEADLINE, bound: int | None = None
) -> Buffer | Awaitable[Buffer]:
    """Read the request's body and undo its content coding; at once if nothing is to wait for.

    A body that came in parts is a memoryview.

    Args:
        limit: Size limit, before and after decompression.
        bound: Size limit of a valid body by the model's signature, or None.

    Raises:
        InvalidArgument: The body is too large, or does not have its stated coding.
        Unsupported: The coding is neither gzip nor deflate.
        TimedOut: The deadline has passed.
        ClientDisconnected: The client disconnected.
    """
    most = limit if bound is None else min(limit, bound)
    body, encoding = request.body.whole(), request.fields.get(b"content-encoding")
    if body is None or (encoding and encoding.strip().lower() != b"identity"):
        return _arriving(request, body, encoding, most, limit, deadline, bound)
    if len(body) > most:
        raise _too_large(most, limit, request.fields, len(body))
    return body


async def read(
    request: HttpRequest, limit: int, deadline: Deadline = NO_DEADLINE, bound: int | None = None
) -> bytes:
    """Read the request's body as ``take``, and copy it if it came in parts."""
    body = take(request, limit, deadline, bound)
    return bytes(body if isinstance(body, bytes | memoryview) else await body)


async def _arriving(
    request: HttpRequest,
    body: Buffer | None,
    encoding: bytes | None,
    most: int,
    limit: int,
    deadline: Deadline,
    bound: int | None,
) -> Buffer:
    if body is None:
        stated = request.fields.get(b"content-length", b"")
        size = int(stated) if stated.isdigit() and len(stated) < 20 else 0
        if size <= most:
            body = await request.body.read(most)
            size = len(body)
    else:
        size = len(body)
    if body is None or size > most:
        raise _too_large(most, limit, request.fields, size)
    if not encoding or encoding.strip().lower() == b"identity":
        return body
    return await _inflated(body, encoding, limit, deadline, bound)


async def read_control(request: Request, limit: int | None = None) -> bytes:
    """Read the body of a request to a FastAPI route, which has no tensors.

    Without a ``limit``, no option raises that of such bodies. Raises as ``take``.
    """
    if limit is not None:
        return await read(request.scope[REQUEST], limit)
    return await read(request.scope[REQUEST], sys.maxsize, bound=CONTROL_BYTES)


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
    is_json = headers.get(b"content-type", b"").startswith(b"application/json")
    if b"content-encoding" in headers or (HEADER_LENGTH in headers and not is_json):
        subject = "request size exceeds the maximum allowed value"
    return InvalidArgument(
        f"{subject} of {limit} bytes. Use --http-max-input-size to increase the limit."
    )


async def _inflated(
    body: Buffer, encoding: bytes, limit: int, deadline: Deadline, bound: int | None
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


def coded(response: HttpResponse, accepted: bytes | None) -> Answer:
    """Code the response's body as the client accepts it; ``accepted``: its ``Accept-Encoding``."""
    if not accepted or len(response.body) < MIN_COMPRESSED_BYTES:
        return response
    coding = _chosen_coding(accepted)
    return _compressed(response, coding) if coding else response


async def _compressed(response: HttpResponse, coding: bytes) -> HttpResponse:
    """Return the response with a coded body; a large one is coded in a thread."""
    body = response.body

    def work() -> bytes:
        compressor = zlib.compressobj(1, wbits=inflation.WINDOW_BITS[coding])
        return compressor.compress(body) + compressor.flush()

    content = work() if len(body) <= offload.PIECE_BYTES else await offload.run(work)
    return HttpResponse(
        response.status, content, [*response.headers, (b"content-encoding", coding)]
    )


def _chosen_coding(header: bytes) -> bytes | None:
    """Choose gzip, deflate or no coding by ``Accept-Encoding`` (RFC 9110, 12.5.3)."""
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
