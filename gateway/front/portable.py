"""The front that runs everywhere: uvicorn for HTTP, ``grpc.aio`` for gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import structlog
import uvicorn

from gateway.errors import Code, ModelportError, Unavailable
from gateway.protocols.asgi import App, Message, Receive, Scope, Send
from gateway.protocols.oip_grpc import Method
from gateway.settings import Settings
from gateway.types import NO_DEADLINE, Deadline

log = structlog.get_logger("modelport.front")

#: How long clients on kept-alive connections have to hear ``connection: close`` while draining.
LAME_DUCK_SECONDS = 1.0
#: gRPC's own default is 4 MB; Triton's limit, and protobuf's, is 2 GiB.
MAX_GRPC_MESSAGE_BYTES = 2**31 - 1
HEADER_LIMIT_BYTES = 64 * 1024
BACKLOG = 2048

STATUS = {
    Code.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Code.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Code.CANCELLED: grpc.StatusCode.CANCELLED,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
    Code.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}


class HttpListener:
    """uvicorn over a socket of ours, without its signal handling."""

    def __init__(self, app: App, address: str, port: int, flag: str) -> None:
        self._app = app
        self._draining = False
        self._socket = _bind(address, port, flag)
        self.port: int = self._socket.getsockname()[1]
        self._server = _Server(
            uvicorn.Config(
                self._handle,
                interface="asgi3",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(
            self._server.serve(sockets=[self._socket])
        )
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise Unavailable("the HTTP listener did not start")
            await asyncio.sleep(0.001)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, _closing(send) if self._draining else send)

    async def drain(self, timeout_seconds: float) -> None:
        """Tell every client to leave, then stop listening, then wait for the last answers.

        Closing at once would reset the client that is just sending on a kept-alive connection.
        """
        self._draining = True
        until = time.monotonic() + min(LAME_DUCK_SECONDS, timeout_seconds)
        while self._server.server_state.connections and time.monotonic() < until:
            await asyncio.sleep(0.01)
        self._server.config.timeout_graceful_shutdown = max(1, round(timeout_seconds))
        self._server.should_exit = True
        if self._task is not None:
            await self._task


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """``server.py`` owns the process and its signals."""
        yield


class PortableFront:
    """Both protocols in this process, on this event loop."""

    def __init__(self, app: App, methods: dict[str, dict[str, Method]], settings: Settings) -> None:
        self._settings = settings
        self._http = HttpListener(app, settings.http_address, settings.http_port, "--http-port")
        self._grpc = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MAX_GRPC_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_GRPC_MESSAGE_BYTES),
                ("grpc.max_metadata_size", HEADER_LIMIT_BYTES),
                ("grpc.so_reuseport", 0),
            ]
        )
        self._grpc.add_generic_rpc_handlers(
            tuple(
                grpc.method_handlers_generic_handler(
                    service, {name: _handler(method) for name, method in rows.items()}
                )
                for service, rows in methods.items()
            )
        )
        self.http_port = self._http.port
        self.grpc_port = 0

    async def start(self) -> None:
        address, port = self._settings.grpc_address, self._settings.grpc_port
        host = f"[{address}]" if ":" in address else address
        try:
            self.grpc_port = self._grpc.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise _taken(address, port, "--grpc-port") from error
        await self._grpc.start()
        await self._http.start()

    async def drain(self, timeout_seconds: float) -> None:
        await asyncio.gather(self._http.drain(timeout_seconds), self._grpc.stop(timeout_seconds))


def _bind(address: str, port: int, flag: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(BACKLOG)  # now, so that a port taken twice is found before any client comes
    except OSError as error:
        listener.close()
        raise _taken(address, port, flag, error.strerror or "") from error
    listener.setblocking(False)
    return listener


def _taken(address: str, port: int, flag: str, reason: str = "address in use") -> Unavailable:
    return Unavailable(
        f"cannot listen on {address}:{port}: {reason.lower()}; choose another with {flag} or "
        f"{flag.replace('port', 'address')}"
    )


def _closing(send: Send) -> Send:
    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"connection", b"close")]
        await send(message)

    return closing


def _handler(method: Method) -> grpc.RpcMethodHandler[Any, Any]:
    codec = {
        "request_deserializer": method.request.FromString,
        "response_serializer": method.reply.SerializeToString,
    }
    if method.request_streams:
        return grpc.stream_stream_rpc_method_handler(_stream(method.handler), **codec)
    if method.reply_streams:
        return grpc.unary_stream_rpc_method_handler(_stream(method.handler), **codec)
    return grpc.unary_unary_rpc_method_handler(_unary(method.handler), **codec)


def _unary(handler: Callable[[Any, Deadline], Any]) -> Any:
    async def serve(message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await handler(message, _deadline(context))
        except ModelportError as error:
            log.debug("rpc failed", status=STATUS[error.code].name, error=str(error))
            await context.abort(STATUS[error.code], str(error))
        except Exception:
            log.exception("request failed")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")

    return serve


def _stream(handler: Callable[[Any, Deadline], AsyncIterator[Any]]) -> Any:
    async def serve(
        messages: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        try:
            async for reply in handler(messages, _deadline(context)):
                yield reply
        except ModelportError as error:
            await context.abort(STATUS[error.code], str(error))

    return serve


def _deadline(context: grpc.aio.ServicerContext[Any, Any]) -> Deadline:
    remaining = context.time_remaining()
    return NO_DEADLINE if remaining is None else Deadline.after(remaining)
