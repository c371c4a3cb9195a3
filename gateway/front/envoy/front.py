"""The front in Envoy's own process: its Python runs the application, its sockets are Envoy's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Iterator
from typing import Any

import orjson
import structlog

from gateway.errors import Unavailable
from gateway.front.envoy.admin import Admin
from gateway.front.envoy.configuration import NAME
from gateway.front.envoy.grpc import GrpcApplication
from gateway.front.envoy.requests import Request, Requests
from gateway.front.listening import QUIET_SECONDS, refuse_newcomers
from gateway.protocols.asgi import App, Message, Receive, Scope, Send
from gateway.protocols.grpc_method import Methods
from gateway.settings import Settings
from gateway.types import Deadline

log = structlog.get_logger("modelport.front")

START_SECONDS = 30.0
POLL_SECONDS = 0.01
#: What is left of the deadline for telling those who are cut off, and for closing.
CLOSING_SECONDS = 0.05
_REQUESTS = f"http.{NAME}.downstream_rq_active"
_CONNECTIONS = f"http.{NAME}.downstream_cx_active"


class CutOff(Exception):
    """An answer ends where it is."""


class EnvoyFront:
    """Called by pyvoy for every request; ``settings`` name the ports that Envoy listens on.

    Envoy binds its ports once ``starting`` is set, and not before.
    """

    def __init__(self, app: App, methods: Methods, settings: Settings, admin: Admin) -> None:
        self._app, self._admin = app, admin
        self._grpc = GrpcApplication(methods, settings.http_max_input_bytes)
        self._requests = Requests()
        self.http_port = settings.http_port
        self.grpc_port = settings.grpc_port
        self.starting = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        request = self._requests.enter(receive, task)
        try:
            if scope["server"][1] == self.grpc_port:
                await self._grpc(scope, request, send)
            else:
                await self._http(scope, request, send)
        finally:
            self._requests.leave(request)

    async def _http(self, scope: Scope, request: Request, send: Send) -> None:
        started = ended = False

        def watched(message: Message) -> Awaitable[None]:
            nonlocal started, ended
            if message["type"] == "http.response.body":
                started, ended = True, not message.get("more_body")
            return send(message)

        try:
            await self._app(scope, request.receive, watched)
        except asyncio.CancelledError:
            # pyvoy would print it. If the client is still there, the application has answered.
            if not (ended or request.disconnected):
                await _refuse(send, 503, "the server is shutting down")
                ended = True
        if request.stalled:
            await _refuse(send, 408, "Request Timeout")
        elif not (ended or request.disconnected):
            if started:
                # An error is what makes pyvoy reset the stream: what is cut off is not whole.
                raise CutOff("the application left its answer without an end")
            await _refuse(send, 500, "internal error")

    async def start(self) -> None:
        """Return once Envoy listens.

        Raises:
            Unavailable: it does not.
        """
        self.starting.set()
        deadline = Deadline.after(START_SECONDS)
        while True:
            with contextlib.suppress(OSError, ValueError):
                answer = await self._admin.get("/listeners?format=json")
                if len(answer.get("listener_statuses", ())) > 0:
                    return
            if deadline.expired:
                raise Unavailable("Envoy does not listen; its reason is in the log")
            await asyncio.sleep(POLL_SECONDS)

    async def lame_duck(self, seconds: float) -> None:
        """Every answer now says ``connection: close``, or is followed by GOAWAY."""
        await self._post("/healthcheck/fail")
        await asyncio.sleep(seconds)

    async def drain(self, deadline: Deadline) -> None:
        """Stop listening without resetting a client that has just connected, then wait."""
        with contextlib.ExitStack() as stack:
            for listener in _listeners({self.http_port, self.grpc_port}):
                refuse_newcomers(stack.enter_context(listener))
        await asyncio.sleep(deadline.earliest(QUIET_SECONDS).remaining() or 0.0)
        await self._post("/drain_listeners")
        while len(self._requests) and not deadline.expired:
            await asyncio.sleep(POLL_SECONDS)
        self._requests.cancel()  # the application answers 503
        closing = Deadline.after(max(deadline.remaining() or 0.0, CLOSING_SECONDS))
        await self._until_none(_REQUESTS, closing)
        await self._until_none(_CONNECTIONS, closing.earliest(QUIET_SECONDS))

    async def _until_none(self, gauge: str, deadline: Deadline) -> None:
        """Wait until Envoy has written what it was given."""
        while not deadline.expired:
            try:
                answer = await self._admin.get(f"/stats?format=json&filter=^{gauge}$")
                if not any(row.get("value") for row in answer["stats"]):
                    return
            except (OSError, ValueError):  # who cleans temporary files may have taken its socket
                deadline = deadline.earliest(QUIET_SECONDS)
            await asyncio.sleep(POLL_SECONDS)

    async def _post(self, target: str) -> None:
        try:
            await self._admin.post(target)
        except OSError as error:
            log.warning("Envoy's administration does not answer", error=str(error))


async def _refuse(send: Send, status: int, message: str) -> None:
    """As Envoy's own refusals; nothing happens where the application has answered already."""
    body = orjson.dumps({"error": message})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    with contextlib.suppress(Exception):
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _listeners(ports: set[int]) -> Iterator[socket.socket]:
    """Duplicates of this process' sockets that listen on ``ports``."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            found: Any = socket.socket(fileno=os.dup(int(name)))
            if (
                found.family in (socket.AF_INET, socket.AF_INET6)
                and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and found.getsockname()[1] in ports
            ):
                yield found
            else:
                found.close()
