"""An HTTP/1.1 listener: a socket, the connections on it, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from modelport.gateway.protocols.asgi import App
from modelport.gateway.server.http1.protocol import HttpConnection
from modelport.gateway.server.http1.server_state import Shared
from modelport.gateway.server.listening import (
    CUT_OFF_SECONDS,
    QUIET_SECONDS,
    ConnectionLimit,
    Listening,
    until_no,
)
from modelport.gateway.types import Deadline


class HttpListener:
    """``app`` on a port.

    Args:
        flag: the one that chooses the port.
        reuse_port: other processes serve on the same port.
        health: the paths that are answered where there is no room for more connections.
        most: connections, for a listener that may have files which are kept from the others.
        overloaded: not empty while a model is overloaded; then unread requests may be refused.
    """

    def __init__(
        self,
        app: App,
        address: str,
        port: int,
        flag: str,
        reuse_port: bool = False,
        health: Collection[bytes] = (),
        most: int | None = None,
        overloaded: Collection[object] = (),
    ) -> None:
        self._shared = shared = Shared(app, ConnectionLimit(most), health, overloaded)
        self._listening = Listening(
            lambda: HttpConnection(shared, asyncio.get_running_loop()),
            *(address, port, flag, reuse_port),
        )
        self.port = self._listening.port

    async def start(self) -> None:
        await self._listening.start()

    async def lame_duck(self, seconds: float) -> None:
        """Serve on for a moment, telling every client to leave its connection."""
        self._shared.leaving = True
        await until_no(self._shared.connections, Deadline.after(seconds))

    async def drain(self, deadline: Deadline) -> None:
        """Stop listening, then wait."""
        shared = self._shared
        shared.leaving = True
        await self._listening.stop()
        await until_no(shared.connections, deadline.earliest(QUIET_SECONDS))
        await until_no(shared.exchanges, deadline)
        for exchange in list(shared.exchanges):
            exchange.cancel()  # the application answers 503
        await until_no(shared.exchanges, Deadline.after(CUT_OFF_SECONDS))
        for each in list(shared.connections):
            each.leave()
        closed = Deadline.after(max(deadline.remaining() or 0.0, CUT_OFF_SECONDS))
        await until_no(shared.connections, closed)
        for each in list(shared.connections):
            each.transport.abort()
