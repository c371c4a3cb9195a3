"""Protection against cross-site request forgery and DNS rebinding.

A web page can send requests to the visitor's own machine, directly or through a host name that it
resolves to the visitor's address, and could unload a model there. Requests that change the server
are therefore checked for their origin. Clients other than browsers send none, and pass.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection

from modelport.gateway.protocols.http_message import HttpRequest
from modelport.gateway.settings import is_loopback

#: Safe methods (RFC 9110, 9.2.1).
_SAFE = frozenset(("GET", "HEAD", "OPTIONS", "TRACE"))
#: Inference and the index change nothing either. All other paths are checked.
_INFERENCE = re.compile(
    r"/v2/models/.+/(infer|generate|generate_stream|explain)|/v2/repository/index|/v1/models/.+|/v1/explain/.+"
    r"|/(predictions|explanations|invocations)(/.*)?|/models/[^/]+/invoke"
)
#: Values of ``Sec-Fetch-Site`` for pages of another origin.
_FOREIGN_SITES = (b"cross-site", b"same-site")
_SHOWN = 100
ANY = "*"


class Origins:
    """Origin check of a gateway on ``address`` with the names ``allowed_hosts`` (``*``: any)."""

    def __init__(self, address: str, allowed_hosts: Collection[str] = ()) -> None:
        self._any = ANY in allowed_hosts
        self._allowed = {name.lower() for name in allowed_hosts}
        self._own = {"localhost", socket.gethostname().lower(), address.lower()}
        self._is_local = is_loopback(address)

    def objection(self, request: HttpRequest) -> str:
        """Return why this request is refused, or an empty string."""
        if self._any or request.method in _SAFE or _INFERENCE.fullmatch(request.path):
            return ""
        headers = request.fields
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
        """Whether the name belongs to this gateway, and nobody else can make it resolve here."""
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
    """Extract the host of ``host:port``, in lower case, without the brackets of an IPv6 address."""
    text = authority.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
