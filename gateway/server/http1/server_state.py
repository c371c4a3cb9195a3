"""State shared by the connections of one HTTP listener."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextvars import Context

from modelport.gateway.protocols.asgi import App, as_method
from modelport.gateway.server.http1.request_cycle import DateHeader, RequestResponseCycle
from modelport.gateway.server.listener import ServerState
from modelport.gateway.server.listening_socket import ConnectionLimit


class HttpServerState(ServerState):
    """Application, limits and open connections of an HTTP listener."""

    def __init__(
        self,
        app: App,
        limit: ConnectionLimit,
        health: Collection[bytes],
        overloaded: Collection[object],
    ) -> None:
        super().__init__(limit)
        self.app: App = as_method(app)
        self.health = frozenset(health)
        self.overloaded = overloaded
        self.date_header = DateHeader()
        #: The application's test of a path under overload, if it has one.
        self._refuses: Callable[[bytes], bool] | None = getattr(app, "refuses", None)

    def start(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        """Call the application, in a context of its own.

        A request of a pipeline starts within the task of the one before, whose caller, memory and
        hops are not its own.
        """
        self.requests.add(cycle)
        cycle.task = loop.create_task(self._run(cycle), context=Context())

    async def _run(self, cycle: RequestResponseCycle) -> None:
        try:
            await cycle.run(self.app)
        finally:
            self.requests.discard(cycle)
            cycle.release()

    def refuses_unread(self, method: bytes, raw_path: bytes) -> bool:
        """Whether to refuse a request after only its head was read.

        That is much cheaper than to have the application refuse it.
        """
        return (
            self._refuses is not None
            and not self.leaving
            and method == b"POST"
            and self._refuses(raw_path)
        )
