"""An HTTP/1.1 listener: its socket, its connections, and their drain."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from modelport.gateway.protocols.asgi import App
from modelport.gateway.server.http1.protocol import HttpConnection
from modelport.gateway.server.http1.server_state import HttpServerState
from modelport.gateway.server.listening import (
    CUT_OFF_SECONDS,
    QUIET_SECONDS,
    ConnectionLimit,
    Listening,
    until_no,
)
from modelport.gateway.types import Deadline


class HttpListener:
    """Serves an ASGI application on a port.

    Args:
        flag: The option that sets the port, for error messages.
        reuse_port: Whether other processes serve on the same port.
        health: Paths that are also served on connections beyond the limit.
        most: Connection limit of a listener that may use the reserved file descriptors.
        overloaded: Not empty while a model is overloaded; unread requests may then be refused.
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
        self._state = state = HttpServerState(app, ConnectionLimit(most), health, overloaded)
        self._listening = Listening(
            lambda: HttpConnection(state, asyncio.get_running_loop()),
            *(address, port, flag, reuse_port),
        )
        self.port = self._listening.port

    async def start(self) -> None:
        await self._listening.start()

    async def lame_duck(self, seconds: float) -> None:
        """Serve for up to ``seconds`` more, and ask every client to close its connection."""
        self._state.leaving = True
        await until_no(self._state.connections, Deadline.after(seconds))

    async def drain(self, deadline: Deadline) -> None:
        """Stop listening; wait for requests in flight, and cancel them at the deadline."""
        state = self._state
        state.leaving = True
        await self._listening.stop()
        await until_no(state.connections, deadline.earliest(QUIET_SECONDS))
        await until_no(state.cycles, deadline)
        for cycle in list(state.cycles):
            cycle.cancel()  # the client gets 503
        await until_no(state.cycles, Deadline.after(CUT_OFF_SECONDS))
        for each in list(state.connections):
            each.leave()
        closed = Deadline.after(max(deadline.remaining() or 0.0, CUT_OFF_SECONDS))
        await until_no(state.connections, closed)
        for each in list(state.connections):
            each.transport.abort()
