"""The front that runs everywhere: HTTP/1.1, and gRPC over HTTP/2, both on the event loop."""

from __future__ import annotations

import asyncio

from gateway.front.grpc.listener import GrpcListener
from gateway.front.grpc.service import Service
from gateway.front.http_listener import HttpListener
from gateway.protocols.asgi import App
from gateway.protocols.grpc_method import Methods
from gateway.settings import Settings
from gateway.types import Deadline


class PortableFront:
    """Both protocols in this process.

    ``reuse_port``: other processes serve on the same ports.
    """

    def __init__(
        self, app: App, methods: Methods, settings: Settings, reuse_port: bool = False
    ) -> None:
        self._http = HttpListener(
            app, settings.http_address, settings.http_port, "--http-port", reuse_port
        )
        service = Service(methods, settings.http_max_input_bytes)
        self._grpc = GrpcListener(
            service, settings.grpc_address, settings.grpc_port, "--grpc-port", reuse_port
        )
        self.http_port = self._http.port
        self.grpc_port = self._grpc.port

    async def start(self) -> None:
        await asyncio.gather(self._http.start(), self._grpc.start())

    async def lame_duck(self, seconds: float) -> None:
        await asyncio.gather(self._http.lame_duck(seconds), self._grpc.lame_duck(seconds))

    async def drain(self, deadline: Deadline) -> None:
        await asyncio.gather(self._http.drain(deadline), self._grpc.drain(deadline))
