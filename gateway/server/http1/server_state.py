"""What the connections of one HTTP/1.1 listener share; the event loop alone changes it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import httptools

from modelport.gateway.protocols.asgi import App
from modelport.gateway.server.http1.request_cycle import Clock, Exchange
from modelport.gateway.server.listening import ConnectionLimit

if TYPE_CHECKING:
    from modelport.gateway.server.http1.protocol import HttpConnection


class Shared:
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
        self.connections: set[HttpConnection] = set()
        self.exchanges: set[Exchange] = set()
        self.clock = Clock()
        #: Clients are told to leave.
        self.leaving = False
        #: The application's word on a path in an overload; not every application has one.
        self._refuses: Callable[[bytes], bool] | None = getattr(app, "refuses", None)

    def refuses_unread(self, parser: httptools.HttpRequestParser, raw_path: bytes) -> bool:
        """Whether the request whose head ``parser`` has read is refused, whatever its body holds.

        That costs a fraction of what the application would take to say the same.
        """
        return (
            self._refuses is not None
            and not self.leaving
            and parser.get_method() == b"POST"
            and parser.should_keep_alive()
            and self._refuses(raw_path)
        )
