"""The front that runs everywhere: uvicorn for HTTP, ``grpc.aio`` for gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
import sys
from collections.abc import AsyncIterator, Collection, Iterator
from typing import Any

import grpc
import structlog
import uvicorn
from google.protobuf.message import DecodeError

from gateway.errors import Code, InvalidArgument, ModelportError, TimedOut, Unavailable
from gateway.front.http_protocol import BoundedProtocol
from gateway.protocols.asgi import App, Message, Receive, Scope, Send
from gateway.protocols.grpc_method import Method, Methods
from gateway.settings import Settings
from gateway.types import NO_DEADLINE, Deadline

log = structlog.get_logger("modelport.front")

#: While draining: how long requests that are on their way are still given an answer, a refusal.
QUIET_SECONDS = 0.3
#: A timeout this close to the call's deadline is that deadline.
CLOCK_SECONDS = 0.05
#: gRPC's own default is 4 MB; Triton's limit, and protobuf's, is 2 GiB.
MAX_GRPC_MESSAGE_BYTES = 2**31 - 1
HEADER_LIMIT_BYTES = 64 * 1024
BACKLOG = 2048
SO_ATTACH_FILTER = 26  # asm-generic/socket.h; Python's socket module does not name it
#: nginx's default. A client that reuses a connection just as it is closed sees an error.
KEEP_ALIVE_SECONDS = 75

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
        self._spare = self._socket.dup()
        self.port: int = self._socket.getsockname()[1]
        self._server = _Server(
            uvicorn.Config(
                self._handle,
                interface="asgi3",
                http=BoundedProtocol,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
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

    async def lame_duck(self, seconds: float) -> None:
        """Serve on for a moment, telling every client to leave its connection."""
        self._draining = True
        await self._until_no(self._server.server_state.connections, Deadline.after(seconds))

    async def drain(self, deadline: Deadline) -> None:
        """Stop listening without resetting a client that has just connected, then wait.

        Closing a socket resets the connections in its backlog. So a duplicate keeps it alive until
        what is in there has been taken in, and whoever has not sent its request yet may do so.
        """
        loop = asyncio.get_running_loop()
        for listener in self._server.servers:
            listener.close()
        _refuse_connections(self._spare)
        accepted = list(_accept_all(self._spare))
        self._spare.close()
        config = self._server.config
        for connection in accepted:
            await loop.connect_accepted_socket(
                lambda: BoundedProtocol(config, self._server.server_state, {}), connection
            )
        state = self._server.server_state
        await self._until_no(state.connections, deadline.earliest(QUIET_SECONDS))
        await self._until_no(state.tasks, deadline)
        for task in list(state.tasks):
            task.cancel()  # the application answers 503
        self._server.force_exit = deadline.expired
        await self._server.shutdown()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _until_no(self, remaining: Collection[Any], deadline: Deadline) -> None:
        while remaining and not deadline.expired:
            await asyncio.sleep(0.01)


def _refuse_connections(listener: socket.socket) -> None:
    """Let the kernel drop what newly knocks, so that nobody is let in and then reset.

    The knock is repeated by the client's kernel, and refused once the socket is closed. A classic
    BPF program of one instruction, "return 0", does it (socket(7), SO_ATTACH_FILTER); elsewhere
    than on Linux the window between the last accept and the close stays.
    """
    if not sys.platform.startswith("linux"):
        return
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    pointer = struct.pack("HP", 1, ctypes.addressof(program))
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, pointer)


def _accept_all(listener: socket.socket) -> Iterator[socket.socket]:
    with contextlib.suppress(BlockingIOError):
        while True:
            connection, _ = listener.accept()
            connection.setblocking(False)
            yield connection


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """``server.py`` owns the process and its signals."""
        yield


class PortableFront:
    """Both protocols in this process, on this event loop."""

    def __init__(self, app: App, methods: Methods, settings: Settings) -> None:
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
            raise _taken(address, port, "--grpc-port", "it cannot be bound") from error
        await self._grpc.start()
        await self._http.start()

    async def lame_duck(self, seconds: float) -> None:
        await asyncio.gather(self._http.lame_duck(seconds), asyncio.sleep(seconds))

    async def drain(self, deadline: Deadline) -> None:
        await asyncio.gather(self._http.drain(deadline), self._stop_grpc(deadline))

    async def _stop_grpc(self, deadline: Deadline) -> None:
        # gRPC cancels calls that arrive once it stops; until then they are refused in good order.
        await asyncio.sleep(deadline.earliest(QUIET_SECONDS).remaining() or 0.0)
        await self._grpc.stop(deadline.remaining())


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


def _taken(address: str, port: int, flag: str, reason: str) -> Unavailable:
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
    # Requests are parsed in the handlers: what gRPC says of bytes that do not parse names classes.
    serializer = method.reply.SerializeToString
    if method.request_streams or method.reply_streams:
        make = (
            grpc.stream_stream_rpc_method_handler
            if method.request_streams
            else grpc.unary_stream_rpc_method_handler
        )
        return make(_stream(method), response_serializer=serializer)
    return grpc.unary_unary_rpc_method_handler(_unary(method), response_serializer=serializer)


def _parse(method: Method, content: bytes) -> Any:
    try:
        return method.request.FromString(content)
    except DecodeError as error:
        raise InvalidArgument(
            f"the request is not a valid {method.request.DESCRIPTOR.name} message"
        ) from error


async def _parse_each(method: Method, contents: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for content in contents:
        yield _parse(method, content)


def _unary(method: Method) -> Any:
    handler = method.handler

    async def serve(content: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await handler(_parse(method, content), _deadline(context))
        except ModelportError as error:
            await context.abort(_status(method, error, context), str(error))
        except Exception:
            log.exception("request failed")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")

    return serve


def _stream(method: Method) -> Any:
    parse = _parse_each if method.request_streams else _parse

    async def serve(
        content: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        try:
            async for reply in method.handler(parse(method, content), _deadline(context)):
                yield reply
        except ModelportError as error:
            await context.abort(_status(method, error, context), str(error))
        except Exception:
            log.exception("stream failed")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")

    return serve


def _status(
    method: Method, error: ModelportError, context: grpc.aio.ServicerContext[Any, Any]
) -> grpc.StatusCode:
    named = method.statuses.get(type(error))
    status = grpc.StatusCode[named] if named else STATUS[error.code]
    remaining = context.time_remaining()
    if isinstance(error, TimedOut) and remaining is not None and remaining < CLOCK_SECONDS:
        status = grpc.StatusCode.DEADLINE_EXCEEDED  # as the client's own clock says
    log.debug("rpc failed", status=status.name, error=str(error))
    return status


def _deadline(context: grpc.aio.ServicerContext[Any, Any]) -> Deadline:
    remaining = context.time_remaining()
    return NO_DEADLINE if remaining is None else Deadline.after(remaining)
