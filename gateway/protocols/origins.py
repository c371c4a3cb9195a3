"""The web origins whose pages may change what a gateway serves.

A browser sends what any page asks of it: a page of another site could unload a model on the
visitor's machine (cross-site request forgery), also by a name of its own that leads to the
visitor's address (DNS rebinding). Clients that are no browsers state no origin, and pass.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection

from modelport.gateway.protocols.asgi import Scope

#: They change nothing (RFC 9110, 9.2.1).
_SAFE = frozenset(("GET", "HEAD", "OPTIONS", "TRACE"))
#: Inference changes nothing, either. Every other path is checked.
_INFERENCE = re.compile(
    r"/v2/models/.+/(infer|generate|generate_stream|explain)|/v1/models/.+|/v1/explain/.+"
    r"|/(predictions|explanations|invocations)(/.*)?|/models/[^/]+/invoke"
)
#: How a browser says that a page of another origin asks.
_FOREIGN_SITES = (b"cross-site", b"same-site")
_SHOWN = 100
ANY = "*"


class Origins:
    """``address``: where the gateway listens. ``allowed_hosts``: names it has besides; or ``*``."""

    def __init__(self, address: str, allowed_hosts: Collection[str] = ()) -> None:
        self._any = ANY in allowed_hosts
        self._allowed = {name.lower() for name in allowed_hosts}
        self._own = {"localhost", socket.gethostname().lower(), address.lower()}
        self._is_local = address == "localhost" or _is_loopback(address)

    def objection(self, scope: Scope) -> str:
        """Why this request is refused; empty: it is not."""
        if self._any or scope["method"] in _SAFE or _INFERENCE.fullmatch(scope["path"]):
            return ""
        headers = dict(scope["headers"])
        origin, host = headers.get(b"origin"), headers.get(b"host", b"")
        if origin is not None:
            authority = origin.partition(b"://")[2]
            if _name(authority) in self._allowed:
                return ""
            if authority != host or not self._is_ours(_name(host)):
                return _refusal("a page of origin", origin)
        elif host and self._is_local and not self._is_ours(_name(host)):
            return _refusal("a client that calls this gateway", host)
        if headers.get(b"sec-fetch-site") in _FOREIGN_SITES:
            return _refusal("a page of a site that is", headers[b"sec-fetch-site"])
        return ""

    def _is_ours(self, name: str) -> bool:
        """Whether no other party can have the name lead here."""
        return (
            name in self._own
            or name in self._allowed
            or name.endswith(".localhost")
            or _address(name) is not None
        )


def _refusal(asker: str, shown: bytes) -> str:
    return (
        f"{asker} '{shown[:_SHOWN].decode('latin-1')}' may not change what is served; if it may, "
        "give its host name with --allowed-host"
    )


def _name(authority: bytes) -> str:
    """The host of ``host:port``, in lower case, without an address's brackets."""
    text = authority.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_loopback(name: str) -> bool:
    address = _address(name)
    return address is not None and address.is_loopback
