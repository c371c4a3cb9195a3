"""A gRPC listener: a socket, the connections on it, and how they end."""

from __future__ import annotations

import asyncio

from modelport.gateway.server.grpc.connection import GrpcConnection
from modelport.gateway.server.grpc.server_state import Shared
from modelport.gateway.server.grpc.service import Service
from modelport.gateway.server.listening import (
    CUT_OFF_SECONDS,
    QUIET_SECONDS,
    ConnectionLimit,
    Listening,
    until_no,
)
from modelport.gateway.types import Deadline

#: How often the connections are looked at.
CHECK_SECONDS = 1.0


class GrpcListener:
    """``service`` on a port.

    Args:
        flag: the one that chooses the port.
        reuse_port: other processes serve on the same port.
    """

    def __init__(
        self, service: Service, address: str, port: int, flag: str, reuse_port: bool = False
    ) -> None:
        self._shared = shared = Shared(service, ConnectionLimit())
        self._listening = Listening(
            lambda: GrpcConnection(shared, asyncio.get_running_loop()),
            *(address, port, flag, reuse_port),
        )
        self.port = self._listening.port
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        await self._listening.start()
        self._check(asyncio.get_running_loop())

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in list(self._shared.connections):
            connection.check(now)
        self._timer = loop.call_later(CHECK_SECONDS, self._check, loop)

    async def lame_duck(self, seconds: float) -> None:
        """Serve on for a moment; clients that know another server go there.

        Others come back: what they open now is told of the end when it comes.
        """
        for connection in list(self._shared.connections):
            connection.warn()
        await asyncio.sleep(seconds)

    async def drain(self, deadline: Deadline) -> None:
        """Stop listening, then wait."""
        shared = self._shared
        await self._listening.stop()
        for connection in list(shared.connections):
            connection.warn()
        await until_no(shared.connections, deadline.earliest(QUIET_SECONDS))
        for connection in list(shared.connections):
            connection.leave()
        await until_no(shared.calls, deadline)
        for call in list(shared.calls):
            call.cancel()  # the service answers UNAVAILABLE
        await until_no(shared.calls, Deadline.after(CUT_OFF_SECONDS))
        closed = Deadline.after(max(deadline.remaining() or 0.0, CUT_OFF_SECONDS))
        await until_no(shared.connections, closed)
        for connection in list(shared.connections):
            connection.transport.abort()
        if self._timer is not None:
            self._timer.cancel()
