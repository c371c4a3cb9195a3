"""The listener of HTTP: its connections begin with HTTP/1.1, and may become HTTP/2."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Collection

from modelport.gateway.protocols.http_message import Handler
from modelport.gateway.server.http1.connection import HttpConnection
from modelport.gateway.server.http1.exchange import HttpServerState
from modelport.gateway.server.listener import Listener
from modelport.gateway.server.listening_socket import ConnectionLimit
from modelport.gateway.server.unix_socket import UnixSocket
from modelport.gateway.telemetry.request_record import NOBODY, RequestObserver


class HttpListener(Listener):
    """Has ``handler`` answer requests. The other arguments are those of ``Listener``.

    Args:
        health: Paths that are also served on connections beyond the limit.
        most: Connection limit of a listener that may use the reserved file descriptors.
        overloaded: Not empty while a model is overloaded; unread requests may then be refused.
        refuses: Whether, under overload, a POST to this path is refused before it is read.
        observer: Who gets the records of requests.
    """

    def __init__(
        self,
        handler: Handler,
        bound: socket.socket,
        health: Collection[bytes] = (),
        most: int | None = None,
        overloaded: Collection[object] = (),
        tls: Callable[[], ssl.SSLContext] | None = None,
        unix: UnixSocket | None = None,
        refuses: Callable[[bytes], bool] | None = None,
        observer: RequestObserver = NOBODY,
    ) -> None:
        limit = ConnectionLimit(most)
        state = HttpServerState(handler, limit, health, overloaded, refuses, observer)

        def make() -> HttpConnection:
            return HttpConnection(state, asyncio.get_running_loop())

        super().__init__(state, make, bound, tls, unix)
