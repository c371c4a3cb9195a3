"""The gateways that a request has come through: the header ``via`` (RFC 9110, 7.6.3).

Two gateways that are each other's upstream servers would pass a request on for ever.
"""

from __future__ import annotations

import secrets
from contextvars import ContextVar

HEADER = "via"
_PSEUDONYM = "modelport-"
#: Of this process.
OWN = _PSEUDONYM + secrets.token_hex(8)
#: More gateways in a row are a circle of several.
MAX_HOPS = 16
MAX_BYTES = 4096
MESSAGE = (
    "the request has come through this gateway before: its routes, and those of the servers "
    "behind it, form a loop"
)
#: What the request that the running task answers came through.
CURRENT: ContextVar[str] = ContextVar("via", default="")

_own = OWN.encode()
_pseudonym = _PSEUDONYM.encode()


def loops(via: bytes) -> bool:
    """Whether a request with this header goes in circles."""
    return _own in via or via.count(_pseudonym) >= MAX_HOPS or len(via) > MAX_BYTES


def onward(protocol: str) -> str:
    """The header of a request to another server, over HTTP ``1.1`` or ``2``."""
    came = CURRENT.get()
    own = f"{protocol} {OWN}"
    return f"{came}, {own}" if came else own
