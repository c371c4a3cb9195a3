"""The table of gRPC methods as an ASGI application.

pyvoy's ``send`` takes effect when it is called. What it returns need be awaited only where more of
the body is to follow: then it waits for the client to take it, or raises because the client went.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import structlog

from gateway.errors import ModelportError
from gateway.front.envoy import framing
from gateway.front.envoy.framing import Frames, MalformedFrame, MessageTooLarge
from gateway.front.envoy.requests import Request
from gateway.front.grpc_errors import MAX_GRPC_MESSAGE_BYTES, parse, status
from gateway.protocols.asgi import Message, Scope, Send
from gateway.protocols.grpc_method import Method, Methods
from gateway.protocols.http_reply import Headers, refuse
from gateway.types import Deadline

log = structlog.get_logger("modelport.front")

#: Messages of a stream are read ahead of their handler up to so many bytes.
READ_AHEAD_BYTES = 1024 * 1024
_CONTENT_TYPE: Headers = [(b"content-type", b"application/grpc")]
_START: Final[Message] = {
    "type": "http.response.start",
    "status": 200,
    "headers": _CONTENT_TYPE,
    "trailers": True,
}
_OK: Final[Message] = {"type": "http.response.trailers", "headers": [(b"grpc-status", b"0")]}
_END: Final[Message] = {"type": "http.response.body", "body": b""}


class _Refused(Exception):
    """The call is refused before any handler sees it."""

    def __init__(
        self, status: grpc.StatusCode, message: str, *headers: tuple[bytes, bytes]
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


class _ClientGone(Exception):
    """Nobody is there to be answered."""


class GrpcApplication:
    """``inflated_limit``: the size in bytes up to which a compressed message is taken."""

    def __init__(self, methods: Methods, inflated_limit: int) -> None:
        self._inflated_limit = inflated_limit
        self._methods = {
            f"/{service}/{name}".encode(): method
            for service, rows in methods.items()
            for name, method in rows.items()
        }

    async def __call__(self, scope: Scope, request: Request, send: Send) -> None:
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"")
        if not kind.startswith(b"application/grpc") or scope["http_version"] != "2":
            await refuse(send, 415, "this port serves gRPC: content-type application/grpc, HTTP/2")
            return
        reply = _Reply(send)
        method = self._methods.get(scope["raw_path"])
        try:
            if method is None:
                raise _Refused(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            if b"grpc-timeout" in headers:
                request.deadline = _deadline(headers[b"grpc-timeout"])
            encoding = headers.get(b"grpc-encoding", b"identity")
            if encoding != b"identity":
                _check(encoding)
            if method.reply_streams:
                await self._stream(method, encoding, request, reply)
            else:
                content = await self._content(encoding, request)
                answer = await method.handler(parse(method, content), request.deadline)
                reply.only(answer.SerializeToString())
        except ModelportError as error:
            left = request.deadline.remaining()
            assert method is not None  # who raises it is the method's handler
            reply.end(status(method, error, left), str(error))
        except (_ClientGone, asyncio.CancelledError):
            if not request.disconnected:
                reply.end(*_cut_off(request))
        except Exception as error:
            reply.end(*_failure(error))

    async def _content(self, encoding: bytes, request: Request) -> bytes | memoryview:
        """The only message of the request."""
        message = await request.receive()
        body: bytes = message.get("body", b"")
        if not request.ended:
            body = await self._rest(body, request)
        if request.disconnected or request.stalled:
            raise _ClientGone
        length = len(body) - framing.PREFIX_BYTES
        if length >= 0 and body[:5] == framing.prefix(length) and length <= MAX_GRPC_MESSAGE_BYTES:
            return memoryview(body)[framing.PREFIX_BYTES :]
        return Frames(encoding, MAX_GRPC_MESSAGE_BYTES, self._inflated_limit).only(body)

    async def _rest(self, first: bytes, request: Request) -> bytes:
        """A body that comes in parts, as soon as its size is known to be wrong no longer."""
        chunks, size = [first], len(first)
        while not request.ended:
            chunk = (await request.receive()).get("body", b"")
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_GRPC_MESSAGE_BYTES + framing.PREFIX_BYTES:
                raise MessageTooLarge(f"Received message larger than max ({size})")
        return b"".join(chunks)

    async def _stream(
        self, method: Method, encoding: bytes, request: Request, reply: _Reply
    ) -> None:
        if method.request_streams:
            frames = Frames(encoding, MAX_GRPC_MESSAGE_BYTES, self._inflated_limit)
            argument: Any = _parsed(method, _Messages(frames, request))
        else:
            argument = parse(method, await self._content(encoding, request))
        async with contextlib.aclosing(method.handler(argument, request.deadline)) as replies:
            async for each in replies:
                await reply.message(each.SerializeToString())
        reply.end(grpc.StatusCode.OK, "")


async def _parsed(method: Method, contents: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for content in contents:
        yield parse(method, content)


class _Messages:
    """A request's messages, read a little ahead, so that its end is seen at once."""

    def __init__(self, frames: Frames, request: Request) -> None:
        self._frames, self._request = frames, request
        self._waiter: asyncio.Future[None] | None = None
        self._receiving = False
        self._receive()

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> bytes:
        while (content := self._frames.take()) is None:
            if self._request.ended:
                if len(self._frames):
                    raise MalformedFrame("the stream ends within a message")
                raise StopAsyncIteration
            self._receive()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._receive()
        return content

    def _receive(self) -> None:
        ahead = len(self._frames) >= READ_AHEAD_BYTES and not self._frames.missing()
        if not self._receiving and not self._request.ended and not ahead:
            self._receiving = True
            self._request.start_receiving().add_done_callback(self._received)

    def _received(self, future: asyncio.Future[Message]) -> None:
        self._receiving = False
        if future.cancelled():
            return
        message = future.result()
        if not message.get("more_body"):
            self._request.note(message)
        if self._request.disconnected:
            self._request.leave()
            return
        self._frames.buffer += message["body"]
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._receive()


class _Reply:
    """What is sent for one call."""

    __slots__ = ("_ended", "_send", "_started")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = self._ended = False

    def only(self, content: bytes) -> None:
        """The answer of a unary call."""
        send = self._send
        send(_START)
        send({"type": "http.response.body", "body": framing.frame(content)})
        send(_OK)
        self._ended = True

    async def message(self, content: bytes) -> None:
        """One of several.

        Raises:
            _ClientGone: nobody takes it.
        """
        if not self._started:
            self._started = True
            self._send(_START)
        body = framing.frame(content)
        try:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        except Exception as error:  # pyvoy's own, which has no public name
            raise _ClientGone from error

    def end(
        self, status: grpc.StatusCode, message: str, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        """The status, in the head where nothing was sent yet."""
        if self._ended:
            return
        self._ended = True
        trailers = [(b"grpc-status", b"%d" % status.value[0]), *headers]
        if message:
            trailers.append((b"grpc-message", framing.percent_encoded(message)))
        if self._started:
            self._send(_END)
            self._send({"type": "http.response.trailers", "headers": trailers})
        else:
            head = {"type": "http.response.start", "status": 200}
            self._send({**head, "headers": [*_CONTENT_TYPE, *trailers]})
            self._send(_END)


def _check(encoding: bytes) -> None:
    if not framing.known(encoding):
        raise _Refused(
            grpc.StatusCode.UNIMPLEMENTED,
            "the message encoding is not supported; use gzip, deflate or none",
            (b"grpc-accept-encoding", framing.ENCODINGS),
        )


def _deadline(value: bytes) -> Deadline:
    try:
        return Deadline.after(framing.timeout_seconds(value))
    except ValueError as error:
        raise _Refused(grpc.StatusCode.INTERNAL, f"invalid grpc-timeout: {error}") from error


def _cut_off(request: Request) -> tuple[grpc.StatusCode, str]:
    if request.expired:
        return grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
    if request.stalled:
        return grpc.StatusCode.CANCELLED, "the request's body stands still"
    return grpc.StatusCode.UNAVAILABLE, "the server is shutting down"


def _failure(error: Exception) -> tuple[Any, ...]:
    match error:
        case _Refused():
            return error.status, str(error), error.headers
        case MessageTooLarge():
            return grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
        case MalformedFrame():
            return grpc.StatusCode.INTERNAL, str(error)
    log.error("request failed", exc_info=error)
    return grpc.StatusCode.INTERNAL, "internal error"
