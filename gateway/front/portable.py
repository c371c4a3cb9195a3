"""The front that runs everywhere: asyncio and httptools for HTTP, ``grpc.aio`` for gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from gateway.errors import ModelportError
from gateway.front.grpc_errors import MAX_GRPC_MESSAGE_BYTES, parse, status
from gateway.front.http_listener import QUIET_SECONDS, HttpListener, taken
from gateway.protocols.asgi import App
from gateway.protocols.grpc_method import Method, Methods
from gateway.settings import Settings
from gateway.types import NO_DEADLINE, Deadline

log = structlog.get_logger("modelport.front")

HEADER_LIMIT_BYTES = 64 * 1024


class PortableFront:
    """Both protocols in this process, on this event loop.

    ``reuse_port``: other processes serve on the same ports.
    """

    def __init__(
        self, app: App, methods: Methods, settings: Settings, reuse_port: bool = False
    ) -> None:
        self._settings = settings
        self._http = HttpListener(
            app, settings.http_address, settings.http_port, "--http-port", reuse_port
        )
        self._grpc = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MAX_GRPC_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_GRPC_MESSAGE_BYTES),
                ("grpc.max_metadata_size", HEADER_LIMIT_BYTES),
                ("grpc.so_reuseport", int(reuse_port)),
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
            raise taken(address, port, "--grpc-port", "it cannot be bound") from error
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


async def _parse_each(method: Method, contents: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for content in contents:
        yield parse(method, content)


def _unary(method: Method) -> Any:
    handler = method.handler

    async def serve(content: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await handler(parse(method, content), _deadline(context))
        except ModelportError as error:
            await context.abort(status(method, error, context.time_remaining()), str(error))
        except Exception:
            log.exception("request failed")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")

    return serve


def _stream(method: Method) -> Any:
    read = _parse_each if method.request_streams else parse

    async def serve(
        content: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        try:
            async for reply in method.handler(read(method, content), _deadline(context)):
                yield reply
        except ModelportError as error:
            await context.abort(status(method, error, context.time_remaining()), str(error))
        except Exception:
            log.exception("stream failed")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")

    return serve


def _deadline(context: grpc.aio.ServicerContext[Any, Any]) -> Deadline:
    remaining = context.time_remaining()
    return NO_DEADLINE if remaining is None else Deadline.after(remaining)
