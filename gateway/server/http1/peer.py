"""The connection of a request over HTTP/1.1 or HTTP/2, as its handler sees it."""

from __future__ import annotations

import asyncio

from modelport.gateway.protocols.http_message import Peer
from modelport.gateway.runtime.request_memory import ConnectionMemory
from modelport.gateway.server.connection_identity import identity_of


def peer_of(transport: asyncio.Transport, memory: ConnectionMemory) -> Peer:
    """Describe a connection for the handlers of its requests."""
    client, server = (address(transport, end) for end in ("peername", "sockname"))
    scheme = "http" if transport.get_extra_info("ssl_object") is None else "https"
    return Peer(scheme, client, server, identity_of(transport), memory)


def address(transport: asyncio.BaseTransport, end: str) -> tuple[str, int] | None:
    """Return host and port; a UNIX domain socket has none."""
    found = transport.get_extra_info(end)
    return found[:2] if isinstance(found, tuple) else None
