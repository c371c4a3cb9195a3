"""The deadline of an HTTP request: what the proxy in front says that it waits for.

Envoy, and what is built of it (Istio, Contour, Envoy Gateway), set this header on every request
that they pass on, from the route's timeout or the client's; any client may set it itself. It counts
from the moment the request's head is here, so receiving and decoding the body are part of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.types import NO_DEADLINE, Deadline

HEADER = b"x-envoy-expected-rq-timeout-ms"
#: As many microseconds as a request's own ``timeout`` may be have fewer, in milliseconds.
_MAX_DIGITS = 18


def deadline(headers: Mapping[bytes, bytes]) -> Deadline:
    """The deadline in ``headers`` (names in lower case); none without the header.

    Raises:
        InvalidArgument: the header is no positive number of milliseconds, or beyond any time.
    """
    stated = headers.get(HEADER)
    if stated is None:
        return NO_DEADLINE
    if not (stated.isdigit() and len(stated) <= _MAX_DIGITS and int(stated)):
        raise InvalidArgument(
            f"header '{HEADER.decode()}' must be a positive integer, in milliseconds, not "
            f"'{stated[:64].decode('latin-1')}'"
        )
    return Deadline.after(int(stated) / 1000)
