"""The HTTP and gRPC listeners of a process, started and drained together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from modelport.gateway.access.access import Access
from modelport.gateway.errors import Unavailable
from modelport.gateway.protocols.grpc_method import Methods
from modelport.gateway.protocols.http_message import Handler
from modelport.gateway.server import unix_socket
from modelport.gateway.server.grpc.connection import GrpcListener
from modelport.gateway.server.grpc.service import Service
from modelport.gateway.server.http1.listener import HttpListener
from modelport.gateway.server.listening_socket import bind
from modelport.gateway.server.tls.certificate import ServerCertificate
from modelport.gateway.settings import Settings
from modelport.gateway.telemetry.request_record import NOBODY, RequestObserver
from modelport.gateway.types import Deadline

#: Paths of health checks.
HEALTH = (b"/v2/health/live", b"/v2/health/ready", b"/ping")


class Listeners:
    """Serves the HTTP port by ``handler``, and the gRPC port by a table of methods.

    ``overloaded`` is not empty while a model is overloaded, ``splits`` while a rollout runs.
    ``reuse_port`` lets other processes serve on the same ports. Without ``certificate`` they serve
    clear text. With ``access``, ``handler`` authenticates its requests, and so does the gRPC port.
    ``refuses`` and ``observer`` are as for ``HttpListener``.

    Raises:
        Unavailable: An address cannot be bound; the message names the option to change.
    """

    def __init__(
        self,
        handler: Handler,
        methods: Methods,
        settings: Settings,
        overloaded: Collection[object],
        splits: Collection[str] = (),
        reuse_port: bool = False,
        certificate: ServerCertificate | None = None,
        access: Access | None = None,
        refuses: Callable[[bytes], bool] | None = None,
        observer: RequestObserver = NOBODY,
    ) -> None:
        route = settings.vertex_ai.health_route if settings.vertex_ai else ""
        unix = unix_socket.listen(settings.http_socket, "--http-socket", settings.socket_mode)
        self._http = HttpListener(
            handler,
            bind(settings.http_address, settings.http_port, "--http-port", reuse_port),
            [*HEALTH, *([route.encode()] if route else [])],
            overloaded=overloaded,
            refuses=refuses,
            tls=None if certificate is None else certificate.http,
            unix=unix,
            observer=observer,
        )
        limit = settings.http_max_input_bytes
        rules = settings.grpc_headers
        service = Service(methods, limit, overloaded, splits, access, rules, observer)
        try:
            unix = unix_socket.listen(settings.grpc_socket, "--grpc-socket", settings.socket_mode)
            self._grpc = GrpcListener(
                service,
                bind(settings.grpc_address, settings.grpc_port, "--grpc-port", reuse_port),
                None if certificate is None else certificate.grpc,
                unix,
            )
        except Unavailable:
            self._http.close()
            raise
        #: The bound ports, which differ from the settings if those are 0.
        self.http_port = self._http.port
        self.grpc_port = self._grpc.port

    async def start(self) -> None:
        await asyncio.gather(self._http.start(), self._grpc.start())

    async def lame_duck(self, seconds: float) -> None:
        """Serve for up to ``seconds`` more, and ask clients to close their connections."""
        await asyncio.gather(self._http.lame_duck(seconds), self._grpc.lame_duck(seconds))

    async def drain(self, deadline: Deadline) -> None:
        """Stop listening; requests in flight finish, or are cancelled at the deadline."""
        await asyncio.gather(self._http.drain(deadline), self._grpc.drain(deadline))
