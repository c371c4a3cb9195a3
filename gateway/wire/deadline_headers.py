"""Headers that carry the deadline of a request: Envoy's over HTTP, and ``grpc-timeout``.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

from collections.abc import Mapping

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.types import NO_DEADLINE, Deadline

#: Timeout that Envoy and its derivatives (Istio, Contour) set on requests that they forward; any
#: client may set it. It starts when the head is received, and includes the body.
HTTP_TIMEOUT = b"x-envoy-expected-rq-timeout-ms"
GRPC_TIMEOUT = b"grpc-timeout"
#: Limits the timeout over HTTP to 10^18 milliseconds.
_MAX_HTTP_DIGITS = 18
_MAX_GRPC_DIGITS = 8
_MAX_GRPC = 10**_MAX_GRPC_DIGITS - 1
_UNITS_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def http_deadline(headers: Mapping[bytes, bytes]) -> Deadline:
    """Read the deadline from ``headers`` (names in lower case), if there is one.

    Raises:
        InvalidArgument: The header is not a positive number of milliseconds.
    """
    stated = headers.get(HTTP_TIMEOUT)
    if stated is None:
        return NO_DEADLINE
    if not (stated.isdigit() and len(stated) <= _MAX_HTTP_DIGITS and int(stated)):
        raise InvalidArgument(
            f"header '{HTTP_TIMEOUT.decode()}' must be a positive integer, in milliseconds, not "
            f"'{stated[:64].decode('latin-1')}'"
        )
    return Deadline.after(int(stated) / 1000)


def http_timeout(seconds: float) -> str:
    """Return the value of ``HTTP_TIMEOUT`` for a request to another server."""
    return str(max(1, int(seconds * 1000)))


def grpc_seconds(value: bytes) -> float:
    """Parse the value of ``GRPC_TIMEOUT``.

    Raises:
        ValueError: It is not a timeout.
    """
    digits, unit = value[:-1], value[-1:].decode("latin-1")
    if not digits.isdigit() or len(digits) > _MAX_GRPC_DIGITS or unit not in _UNITS_SECONDS:
        raise ValueError("a timeout is up to eight digits and one of H, M, S, m, u, n")
    return int(digits) * _UNITS_SECONDS[unit]


def grpc_timeout(seconds: float) -> bytes:
    """Return the value of ``GRPC_TIMEOUT`` for a call to another server."""
    for unit, per_second in ((b"u", 1e6), (b"m", 1e3)):
        if seconds * per_second < _MAX_GRPC:
            return b"%d%b" % (max(1, int(seconds * per_second)), unit)
    return b"%dS" % min(_MAX_GRPC, int(seconds))
