"""A listener: a socket, the connections on it, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from modelport.gateway.server.listening_socket import (
    CUT_OFF_SECONDS,
    QUIET_SECONDS,
    ConnectionLimit,
    ListeningSocket,
    until_no,
)
from modelport.gateway.types import Deadline


class ServerSideConnection(Protocol):
    """One connection of a listener."""

    transport: asyncio.Transport

    def warn(self) -> None:
        """Tell the client to send further requests elsewhere; accept those on their way."""

    def leave(self) -> None:
        """Accept no further request, if the protocol can tell the client which were accepted."""

    def close(self) -> None:
        """Close now, or behind the responses under way."""


class Cancellable(Protocol):
    """A request that is being answered."""

    def cancel(self) -> None:
        """Cut the handler off; the client is told why."""


class ServerState:
    """State that all connections of a listener share. Only the event loop changes it."""

    def __init__(self, limit: ConnectionLimit) -> None:
        self.limit = limit
        self.connections: set[ServerSideConnection] = set()
        self.requests: set[Cancellable] = set()
        #: Whether clients are told to leave.
        self.leaving = False


class Listener:
    """``make``'s connections on a port.

    Args:
        flag: the flag that chooses the port.
        reuse_port: other processes serve on the same port.
    """

    def __init__(
        self,
        state: ServerState,
        make: Callable[[], asyncio.BaseProtocol],
        address: str,
        port: int,
        flag: str,
        reuse_port: bool,
    ) -> None:
        self.state = state
        self._listening = ListeningSocket(make, address, port, flag, reuse_port)
        self.port = self._listening.port

    def close(self) -> None:
        """Free the port of a listener that was not started."""
        self._listening.close()

    async def start(self) -> None:
        await self._listening.start()

    async def lame_duck(self, seconds: float) -> None:
        """Serve on for a moment, telling every client to leave its connection.

        Clients that know another server go there. Others come back, and are told when they do.
        """
        self._warn()
        await asyncio.sleep(seconds)

    def _warn(self) -> None:
        self.state.leaving = True
        for connection in list(self.state.connections):
            connection.warn()

    async def drain(self, deadline: Deadline) -> None:
        """Stop listening; requests in flight finish, or are cut off at the deadline."""
        state = self.state
        await self._listening.stop()
        self._warn()
        await until_no(state.connections, deadline.earliest(QUIET_SECONDS))
        for connection in list(state.connections):
            connection.leave()
        await until_no(state.requests, deadline)
        for request in list(state.requests):
            request.cancel()
        await until_no(state.requests, Deadline.after(CUT_OFF_SECONDS))
        for connection in list(state.connections):
            connection.close()
        closed = Deadline.after(max(deadline.remaining() or 0.0, CUT_OFF_SECONDS))
        await until_no(state.connections, closed)
        for connection in list(state.connections):
            connection.transport.abort()
