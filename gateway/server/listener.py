"""A listener: a socket, the connections on it, and how they end."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Protocol

from modelport.gateway.server.listening_socket import (
    CUT_OFF_SECONDS,
    NEWCOMER_SECONDS,
    QUIET_SECONDS,
    ConnectionLimit,
    ListeningSocket,
    Room,
    until_no,
)
from modelport.gateway.server.tls.transport import TlsTransport
from modelport.gateway.server.unix_socket import UnixSocket
from modelport.gateway.types import Deadline


class ServerSideConnection(Protocol):
    """One connection of a listener."""

    transport: asyncio.Transport

    @property
    def idle(self) -> bool:
        """Whether it has no request."""

    @property
    def waiting(self) -> bool:
        """Whether nothing is done for it before its client sends or reads more."""

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
        #: In the order in which they came.
        self.connections: dict[ServerSideConnection, None] = {}
        self.requests: set[Cancellable] = set()
        #: Connections whose first request has not come, by the time at which they began, if their
        #: protocol cannot tell a client that it was not accepted.
        self.newcomers: dict[ServerSideConnection, float] = {}
        #: Whether clients are told to leave.
        self.leaving = False

    def admit(self, connection: ServerSideConnection, transport: asyncio.BaseTransport) -> Room:
        """Add a new connection, unless there is no room for it."""
        number = transport.get_extra_info("socket").fileno()
        room = self.limit.room(len(self.connections), number)
        if room is not Room.FREE and self.limit.replaces_waiting:
            idle = (each for each in self.connections if each.idle)
            waiting = (each for each in self.connections if each.waiting)
            replaced = next(idle, None) or next(waiting, None)
            if replaced is not None:
                del self.connections[replaced]
                if replaced.idle:
                    replaced.close()
                else:
                    replaced.transport.abort()
                room = Room.FREE
        if room is not Room.NONE:
            self.connections[connection] = None
        return room


class Listener:
    """``make``'s connections on a port, and on a UNIX domain socket.

    Args:
        bound: the socket of the port, see ``listening_socket.bind``.
        tls: returns the context of a new connection's handshake, so that a new certificate needs no
            new listener; None for clear text, as on the UNIX domain socket.
    """

    def __init__(
        self,
        state: ServerState,
        make: Callable[[], asyncio.BaseProtocol],
        bound: socket.socket,
        tls: Callable[[], ssl.SSLContext] | None = None,
        unix: UnixSocket | None = None,
    ) -> None:
        self.state = state
        self.port: int = bound.getsockname()[1]
        secure = None if tls is None else lambda: TlsTransport(state, tls(), make())
        self._sockets = [ListeningSocket(secure or make, bound)]
        if unix is not None:
            self._sockets.append(ListeningSocket(make, unix.socket, unix.remove))

    def close(self) -> None:
        """Free the addresses of a listener that was not started."""
        for each in self._sockets:
            each.close()

    async def start(self) -> None:
        for each in self._sockets:
            await each.start()

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
        await asyncio.gather(*(each.stop() for each in self._sockets))
        self._warn()
        await until_no(state.connections, deadline.earliest(QUIET_SECONDS))
        await self._until_newcomers_asked(deadline)
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

    async def _until_newcomers_asked(self, deadline: Deadline) -> None:
        """Wait for the first requests of clients that connected a moment ago."""
        newcomers, deadline = self.state.newcomers, deadline.earliest(NEWCOMER_SECONDS)
        oldest = asyncio.get_running_loop().time() - NEWCOMER_SECONDS
        recent = {each for each, began in newcomers.items() if began > oldest}
        while recent & newcomers.keys() and not deadline.expired:
            await asyncio.sleep(0.01)
