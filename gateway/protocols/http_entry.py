"""The HTTP port's way in: what is hot at once, everything else through the framework.

Importing the framework and building every route with it takes longer than loading a small model. So
it is done when the first request needs it, or when the server, once READY, has little to do: those
who have waited for that are not to share the processor with it.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from gateway.protocols.asgi import App, Receive, Scope, Send

#: It has little to do that used less of a processor than this for so long.
IDLE_SECONDS, IDLE_SHARE = 0.25, 0.1
#: How soon the event loop gets the interpreter back meanwhile; a tenth of what it waits elsewhere.
SWITCH_SECONDS = 0.0005


class Hot(Protocol):
    """What answers without the framework."""

    def serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None] | None:
        """What answers, if the path is one of the hot ones."""

    def refuses(self, raw_path: bytes) -> bool:
        """Whether a POST to this path is refused for an overload; it is then counted."""


class HttpEntry:
    """``build`` makes the application of all routes, the hot ones too; blocking."""

    def __init__(self, hot: Hot, build: Callable[[], App]) -> None:
        self._hot = hot
        self._build = build
        self._all: App | None = None
        self._building: asyncio.Future[App] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and b"%" not in scope["raw_path"]:
            answer = self._hot.serve(scope, receive, send)
            if answer is not None:
                await answer
                return
        application = self._all or await self.complete()
        await application(scope, receive, send)

    def refuses(self, raw_path: bytes) -> bool:
        """Whether a POST to this path is refused for an overload, and need not come here."""
        return self._hot.refuses(raw_path)

    async def complete(self) -> App:
        """The application of all routes, built once, beside the event loop."""
        if self._building is None:
            self._building = asyncio.ensure_future(asyncio.to_thread(self._build_aside))
        # Whoever gives up leaves it to the others.
        self._all = await asyncio.shield(self._building)
        return self._all

    async def complete_when_idle(self) -> None:
        """``complete``, if nobody has needed it until this process has little to do."""
        before, used = -math.inf, time.process_time()
        while self._building is None and used - before > IDLE_SHARE * IDLE_SECONDS:
            await asyncio.sleep(IDLE_SECONDS)
            before, used = used, time.process_time()
        await self.complete()

    def _build_aside(self) -> App:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            return self._build()
        finally:
            sys.setswitchinterval(interval)
