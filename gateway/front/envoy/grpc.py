"""The table of gRPC methods as an ASGI application.

pyvoy's ``send`` takes effect when it is called. What it returns need be awaited only where more of
the body is to follow: then it waits for the client to take it, or raises because the client went.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from gateway.front.envoy.requests import Request
from gateway.front.grpc import framing
from gateway.front.grpc.framing import MAX_MESSAGE_BYTES, Frames, MalformedFrame
from gateway.front.grpc.service import (
    CLOSING,
    LATE,
    STALLED,
    Ending,
    Gone,
    Service,
)
from gateway.protocols.asgi import Message, Scope, Send
from gateway.protocols.grpc_method import Methods
from gateway.protocols.http_reply import Headers, refuse
from gateway.types import Deadline
from gateway.wire.raw import Buffer

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


class GrpcApplication:
    """``inflated_limit``: the size in bytes up to which a compressed message is taken."""

    def __init__(self, methods: Methods, inflated_limit: int) -> None:
        self._service = Service(methods, inflated_limit)

    async def __call__(self, scope: Scope, request: Request, send: Send) -> None:
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"")
        if not kind.startswith(b"application/grpc") or scope["http_version"] != "2":
            await refuse(send, 415, "this port serves gRPC: content-type application/grpc, HTTP/2")
            return
        target = self._service.target(scope["raw_path"], headers)
        if target.timeout_seconds is not None:
            request.deadline = Deadline.after(target.timeout_seconds)
        await self._service.serve(target, _Call(request, send))


class _Call:
    """``Call`` for the gRPC service."""

    __slots__ = ("_ended", "_request", "_send", "_started", "deadline")

    def __init__(self, request: Request, send: Send) -> None:
        self._request, self._send = request, send
        self.deadline = request.deadline
        self._started = self._ended = False

    # -- the request ------------------------------------------------------------------------------

    async def body(self) -> bytes:
        request = self._request
        body: bytes = (await request.receive()).get("body", b"")
        if not request.ended:
            body = await self._rest(body)
        if request.disconnected or request.stalled:
            raise Gone
        return body

    async def _rest(self, first: bytes) -> bytes:
        """A body that comes in parts, as soon as its size is known to be wrong no longer."""
        chunks, size = [first], len(first)
        while not self._request.ended:
            chunk = (await self._request.receive()).get("body", b"")
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_MESSAGE_BYTES + framing.PREFIX_BYTES:
                raise framing.too_large(size)
        return b"".join(chunks)

    def messages(self, frames: Frames) -> _Messages:
        return _Messages(frames, self._request)

    def cut_off(self) -> Ending:
        if self._request.expired:
            return LATE
        return STALLED if self._request.stalled else CLOSING

    # -- the answer -------------------------------------------------------------------------------

    def only(self, content: Sequence[Buffer]) -> None:
        send = self._send
        send(_START)
        prefix = framing.prefix(sum(map(len, content)))
        send({"type": "http.response.body", "body": b"".join((prefix, *content))})
        send(_OK)
        self._ended = True

    async def message(self, content: bytes) -> None:
        if not self._started:
            self._started = True
            self._send(_START)
        body = framing.frame(content)
        try:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        except Exception as error:  # pyvoy's own, which has no public name
            raise Gone from error

    def end(self, ending: Ending) -> None:
        if self._ended or self._request.disconnected:
            return
        self._ended = True
        if self._started:
            self._send(_END)
            self._send({"type": "http.response.trailers", "headers": ending.fields()})
        else:
            head = {"type": "http.response.start", "status": 200}
            self._send({**head, "headers": [*_CONTENT_TYPE, *ending.fields()]})
            self._send(_END)


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
