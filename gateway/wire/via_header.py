"""Loop detection by the ``Via`` header (RFC 9110, 7.6.3).

Two gateways that route to each other would forward a request endlessly.
"""

from __future__ import annotations

import secrets
from contextvars import ContextVar

HEADER = "via"
_PSEUDONYM = "modelport-"
#: Pseudonym of this process.
OWN = _PSEUDONYM + secrets.token_hex(8)
#: A longer chain of gateways counts as a loop.
MAX_HOPS = 16
MAX_BYTES = 4096
MESSAGE = (
    "the request has already passed through this gateway: its routes, and those of the servers "
    "behind it, form a loop"
)
#: The ``Via`` header of the request that the current task serves.
CURRENT: ContextVar[str] = ContextVar("via", default="")

_own = OWN.encode()
_pseudonym = _PSEUDONYM.encode()


def loops(via: bytes) -> bool:
    """Whether a request with this header has looped."""
    return _own in via or via.count(_pseudonym) >= MAX_HOPS or len(via) > MAX_BYTES


def onward(protocol: str) -> str:
    """Make the header of a request to an upstream server, over HTTP ``1.1`` or ``2``."""
    received = CURRENT.get()
    own = f"{protocol} {OWN}"
    return f"{received}, {own}" if received else own
