"""Error responses that an HTTP/1.1 connection sends without calling the application."""

from __future__ import annotations

from modelport.gateway.errors import MemoryExhausted, QueueFull
from modelport.gateway.wire import via_header

#: Status code with its phrase, and the message.
ErrorResponse = tuple[str, str]

INVALID: ErrorResponse = ("400 Bad Request", "Invalid HTTP request received.")
HOST: ErrorResponse = ("400 Bad Request", "the request must have one valid Host header")
VERSION: ErrorResponse = ("400 Bad Request", "the HTTP version must be 1.1 or 1.0")
CODING: ErrorResponse = ("501 Not Implemented", "the transfer coding is not supported; use chunked")
CHUNKS: ErrorResponse = (
    "400 Bad Request",
    "Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger HTTP "
    "chunks.",
)
SLOW: ErrorResponse = ("408 Request Timeout", "Request Timeout")
LONG: ErrorResponse = ("431 Request Header Fields Too Large", "Request Header Fields Too Large")
CROWDED: ErrorResponse = ("503 Service Unavailable", "too many connections")
LOOP: ErrorResponse = ("508 Loop Detected", via_header.MESSAGE)
SCARCE: ErrorResponse = ("503 Service Unavailable", MemoryExhausted().message)
OVERLOADED: ErrorResponse = ("503 Service Unavailable", QueueFull().message)


class RefusedHead(Exception):
    """A callback of the parser refuses the request, with ``response``."""

    def __init__(self, response: ErrorResponse) -> None:
        self.response = response


def for_error(error: Exception) -> ErrorResponse:
    """Choose the response to an error of the parser, or of one of its callbacks."""
    reason = error.__context__
    if isinstance(reason, RefusedHead):
        return reason.response
    return SCARCE if isinstance(reason, MemoryExhausted) else INVALID


def body_of(response: ErrorResponse) -> bytes:
    return b'{"error":"%b"}' % response[1].encode()


def serialize(response: ErrorResponse, close: bool = True) -> bytes:
    """Encode the response; ``close`` announces the end of the connection."""
    status, _ = response
    body = body_of(response)
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
    head += "retry-after: 1\r\n" if status.startswith("503") else ""
    head += f"content-length: {len(body)}\r\n"
    head += "connection: close\r\n\r\n" if close else "\r\n"
    return head.encode() + body


#: Encoded once, because overload responses must be cheap.
TRY_AGAIN = serialize(OVERLOADED, close=False)
