"""What pyvoy loads: the ASGI application that runs a gateway inside Envoy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from gateway.front.envoy.admin import Admin
from gateway.front.envoy.environment import Environment
from gateway.front.envoy.front import EnvoyFront
from gateway.protocols.asgi import App, Receive, Scope, Send
from gateway.protocols.grpc_method import Methods
from gateway.settings import Settings

log = structlog.get_logger("modelport.front")

MakeFront = Callable[[App, Methods, Settings], EnvoyFront]


class Application:
    """``run`` serves until the process ends, with the front that it makes."""

    def __init__(self, run: Callable[[MakeFront], Awaitable[Any]]) -> None:
        self._run = run
        self._admin = Admin(Environment.adopt().admin)
        self._front: EnvoyFront | None = None
        self._made = asyncio.Event()
        #: The loop itself keeps no task alive.
        self._running: asyncio.Future[Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._front is not None and scope["type"] == "http":
            await self._front(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._live(receive, send)

    def _make(self, app: App, methods: Methods, settings: Settings) -> EnvoyFront:
        self._front = EnvoyFront(app, methods, settings, self._admin)
        self._made.set()
        return self._front

    async def _live(self, receive: Receive, send: Send) -> None:
        """Let Envoy bind its ports when the front is to start, and not before."""
        await receive()
        self._running = running = asyncio.ensure_future(self._run(self._make))
        starting = asyncio.ensure_future(self._starting())
        await asyncio.wait({running, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            error = None if running.cancelled() else running.exception()
            log.error("the gateway did not start", exc_info=error)
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await running

    async def _starting(self) -> None:
        await self._made.wait()
        assert self._front is not None
        await self._front.starting.wait()
