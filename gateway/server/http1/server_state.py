"""State shared by the connections of one HTTP/1.1 listener."""

from __future__ import annotations

from collections.abc import Callable, Collection

import httptools

from modelport.gateway.protocols.asgi import App
from modelport.gateway.server.http1.request_cycle import (
    CycleConnection,
    DateHeader,
    RequestResponseCycle,
)
from modelport.gateway.server.listening import ConnectionLimit


class HttpServerState:
    """Application, limits and open connections. Only the event loop changes them."""

    def __init__(
        self,
        app: App,
        limit: ConnectionLimit,
        health: Collection[bytes],
        overloaded: Collection[object],
    ) -> None:
        self.app = app
        self.limit = limit
        self.health = frozenset(health)
        self.overloaded = overloaded
        self.connections: set[CycleConnection] = set()
        self.cycles: set[RequestResponseCycle] = set()
        self.date_header = DateHeader()
        #: Whether responses ask clients to close the connection.
        self.leaving = False
        #: The application's test of a path under overload, if it has one.
        self._refuses: Callable[[bytes], bool] | None = getattr(app, "refuses", None)

    def refuses_unread(self, parser: httptools.HttpRequestParser, raw_path: bytes) -> bool:
        """Whether to refuse the request whose head ``parser`` has read, without its body.

        That is much cheaper than to have the application refuse it.
        """
        return (
            self._refuses is not None
            and not self.leaving
            and parser.get_method() == b"POST"
            and parser.should_keep_alive()
            and self._refuses(raw_path)
        )
