"""What an HTTP/1.1 connection says no with by itself, in this API's form."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.errors import QueueFull

#: A status line's end, and the reason.
Refusal = tuple[str, str]

INVALID: Refusal = ("400 Bad Request", "Invalid HTTP request received.")
SLOW: Refusal = ("408 Request Timeout", "Request Timeout")
LONG: Refusal = ("431 Request Header Fields Too Large", "Request Header Fields Too Large")
CROWDED: Refusal = ("503 Service Unavailable", "too many connections")
OVERLOADED: Refusal = ("503 Service Unavailable", QueueFull().message)


class LongHead(Exception):
    """A request's head is longer than it may be."""


def bound_head(url: bytes, headers: Iterable[tuple[bytes, bytes]], most: int) -> None:
    """Raise ``LongHead`` where target and headers, each with its line's end, exceed ``most`` bytes.

    For a head that is complete: its end may have come in the segment that made it too long.
    """
    if len(url) + sum(len(name) + len(value) + 4 for name, value in headers) > most:
        raise LongHead


def of(error: Exception) -> Refusal:
    """What is said of a request that ``error`` of the parser, or of one of its callbacks, ended."""
    return LONG if isinstance(error.__context__, LongHead) else INVALID


def whole(refusal: Refusal, last: bool = True) -> bytes:
    """The answer in one piece. ``last``: the connection's."""
    status, reason = refusal
    body = b'{"error":"%b"}' % reason.encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
    head += "retry-after: 1\r\n" if status.startswith("503") else ""
    head += f"content-length: {len(body)}\r\n"
    head += "connection: close\r\n\r\n" if last else "\r\n"
    return head.encode() + body


#: Made once: in an overload there is no time for more.
TRY_AGAIN = whole(OVERLOADED, last=False)
