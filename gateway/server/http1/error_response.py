"""What an HTTP/1.1 connection says no with by itself, in this API's form."""

from __future__ import annotations

from modelport.gateway.errors import MemoryExhausted, QueueFull
from modelport.gateway.server.http1.head import LongHead
from modelport.gateway.wire import hops

#: A status line's end, and the reason.
Refusal = tuple[str, str]

INVALID: Refusal = ("400 Bad Request", "Invalid HTTP request received.")
SLOW: Refusal = ("408 Request Timeout", "Request Timeout")
LONG: Refusal = ("431 Request Header Fields Too Large", "Request Header Fields Too Large")
CROWDED: Refusal = ("503 Service Unavailable", "too many connections")
LOOP: Refusal = ("508 Loop Detected", hops.MESSAGE)
SCARCE: Refusal = ("503 Service Unavailable", MemoryExhausted().message)
OVERLOADED: Refusal = ("503 Service Unavailable", QueueFull().message)


class Looping(Exception):
    """The request has come through this gateway before."""


class Crowded(Exception):
    """There is no room but for questions about health."""


def of(error: Exception) -> Refusal:
    """What is said of a request that ``error`` of the parser, or of one of its callbacks, ended."""
    reason = error.__context__
    if isinstance(reason, MemoryExhausted):
        return SCARCE
    if isinstance(reason, Looping):
        return LOOP
    if isinstance(reason, Crowded):
        return CROWDED
    return LONG if isinstance(reason, LongHead) else INVALID


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
