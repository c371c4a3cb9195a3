"""The table of gRPC methods over any transport: what a call asks for, and how it is answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import structlog
from google.protobuf.message import DecodeError

from modelport.gateway.access.context import CURRENT
from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import InvalidArgument, ModelportError, QueueFull
from modelport.gateway.protocols import header_rules
from modelport.gateway.protocols.grpc_method import (
    ERRORS_END,
    ERRORS_END_KEY,
    Method,
    Methods,
    RefusedMessage,
    parts_of,
)
from modelport.gateway.rollout.plan import ROUTE_KEY
from modelport.gateway.rollout.traffic import request_routing
from modelport.gateway.rollout.traffic.request_routing import RequestRouting
from modelport.gateway.runtime import offload, request_memory
from modelport.gateway.server.grpc import framing
from modelport.gateway.server.grpc.framing import (
    MAX_MESSAGE_BYTES,
    Compressed,
    Frames,
    MalformedFrame,
    MessageTooLarge,
)
from modelport.gateway.server.grpc.status import StatusCode, is_late, parse, status
from modelport.gateway.settings import NO_HEADER_RULES, HeaderRules
from modelport.gateway.telemetry.request_record import NOBODY, RequestObserver
from modelport.gateway.types import Deadline, finished
from modelport.gateway.wire import inflation, via_header
from modelport.gateway.wire.deadline_headers import GRPC_TIMEOUT, grpc_seconds
from modelport.gateway.wire.raw_tensors import Buffer

if TYPE_CHECKING:
    from modelport.gateway.access.access import Access
    from modelport.gateway.server.grpc.stream import GrpcStream

log = structlog.get_logger("modelport.grpc")

#: The tasks and queues of a call that streams.
STREAM_BYTES = 16 * 1024
#: Operations whose replies may be much larger than their requests.
LARGE_REPLIES = frozenset({Operation.METADATA, Operation.STATISTICS})
Headers = tuple[tuple[bytes, bytes], ...]
_ROUTE_KEY = ROUTE_KEY.encode()
#: Printable ASCII without the percent sign, besides what ``quote`` never touches.
_PLAIN = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"


class ClientGone(Exception):
    """The client has disconnected."""


class Ending(NamedTuple):
    """The end of a call: trailers, or a head if nothing was sent yet."""

    status: StatusCode
    message: str = ""
    headers: Headers = ()

    def fields(self) -> list[tuple[bytes, bytes]]:
        fields = [(b"grpc-status", b"%d" % self.status), *self.headers]
        if self.message:
            fields.append((b"grpc-message", quote(self.message, safe=_PLAIN).encode()))
        return fields


OK = Ending(StatusCode.OK)
INTERNAL = Ending(StatusCode.INTERNAL, "internal error")
NO_METHOD = Ending(StatusCode.UNIMPLEMENTED, "Method not found!")
STALLED = Ending(StatusCode.CANCELLED, "the request's body has stalled")
GONE = Ending(StatusCode.CANCELLED, "the client has disconnected")
BUSY = Ending(StatusCode.UNAVAILABLE, QueueFull().message)
CROWDED = Ending(StatusCode.UNAVAILABLE, "too many connections")
LATE = Ending(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
CLOSING = Ending(StatusCode.UNAVAILABLE, "the server is shutting down")
LOOP = Ending(StatusCode.FAILED_PRECONDITION, via_header.MESSAGE)
NO_ENCODING = Ending(
    StatusCode.UNIMPLEMENTED,
    "the message encoding is not supported; use gzip, deflate or none",
    ((b"grpc-accept-encoding", framing.ENCODINGS),),
)


class CallTarget(NamedTuple):
    """The request of a call's headers. Without a ``method``, the call ends with ``refusal``."""

    method: Method | None = None
    encoding: bytes = framing.IDENTITY
    timeout_seconds: float | None = None
    refusal: Ending = NO_METHOD
    via: str = ""
    route_key: bytes = b""
    #: The fields, if some become parameters.
    forwarded: Mapping[bytes, bytes] = {}
    #: Whether the first error ends the stream.
    errors_end: bool = False


class Service:
    """``max_message``: the largest message of a request, in bytes, also after decompression.

    ``overloaded`` is not empty while a model is overloaded; then unread requests may be refused.
    ``splits`` is not empty while a rollout runs; then trailers name the version that answered.
    ``access`` admits calls by their credential and their method's operation. ``rules`` are about
    their header fields. ``observer`` gets the records of calls.
    """

    def __init__(
        self,
        methods: Methods,
        max_message: int,
        overloaded: Collection[object] = (),
        splits: Collection[str] = (),
        access: Access | None = None,
        rules: HeaderRules = NO_HEADER_RULES,
        observer: RequestObserver = NOBODY,
    ) -> None:
        self._rules = rules
        self.overloaded, self.observer = overloaded, observer
        self.access = access
        self._splits = splits
        self.max_message = min(max_message, MAX_MESSAGE_BYTES)
        self._methods: dict[bytes, Method] = {}
        for service, rows in methods.items():
            for name, row in rows.items():
                self._methods[f"/{service}/{name}".encode()] = row

    def target(self, path: bytes, headers: Mapping[bytes, bytes]) -> CallTarget:
        """Interpret ``headers``, whose names are in lower case."""
        method = self._methods.get(path)
        if method is None:
            return CallTarget()
        seconds = None
        if GRPC_TIMEOUT in headers:
            try:
                seconds = grpc_seconds(headers[GRPC_TIMEOUT])
            except ValueError as error:
                message = f"invalid grpc-timeout: {error}"
                return CallTarget(refusal=Ending(StatusCode.INTERNAL, message))
        encoding = headers.get(b"grpc-encoding", framing.IDENTITY)
        if encoding != framing.IDENTITY and encoding not in inflation.WINDOW_BITS:
            return CallTarget(refusal=NO_ENCODING)
        if self._rules.restricted:
            name = path.decode()
            found = header_rules.objection(self._rules, "protocol", method.operation, name, headers)
            if found:
                return CallTarget(refusal=Ending(StatusCode.UNAVAILABLE, found))
        via = headers.get(b"via", b"")
        if via and via_header.loops(via):
            return CallTarget(refusal=LOOP)
        return CallTarget(
            method,
            encoding,
            seconds,
            via=via.decode("latin-1"),
            route_key=headers.get(_ROUTE_KEY, b""),
            forwarded=headers if self._rules.forwarded is not None else {},
            errors_end=method.request_streams and headers.get(ERRORS_END_KEY) == b"true",
        )

    def refuses(self, target: CallTarget, body: bytes | memoryview) -> bool:
        """Whether a call with this body is refused for an overload whatever it holds: ``BUSY``.

        With ``access``, ``serve`` refuses it, and knows the caller.
        """
        method = target.method
        if self.access is not None or method is None or method.refuses is None:
            return False
        if not body or body[0]:
            return False  # a message that is compressed has to be read
        return method.refuses(memoryview(body)[framing.PREFIX_BYTES :])

    def start(self, call: GrpcStream) -> Coroutine[Any, Any, None] | None:
        """Answer ``call``, or return what answers it where there is something to wait for."""
        call.enter()
        if call.access is not None:
            CURRENT.set(call.access)
        if self._rules.forwarded is not None:
            header_rules.begin_call(self._rules.forwarded, call.target.forwarded)
        if call.target.errors_end:
            ERRORS_END.set(True)
        method = call.target.method
        assert method is not None
        routing = request_routing.begin(call.target.route_key) if self._splits else None
        try:
            answer = self._begin(method, call)
        except Exception as error:
            self._fail(method, call, error, routing)
            return None
        if hasattr(answer, "__await__"):  # the abstract class takes five times as long
            return self._finish(method, call, answer, routing)
        call.only(parts_of(answer), _ok(call, routing))
        return None

    async def _finish(
        self,
        method: Method,
        call: GrpcStream,
        answer: Coroutine[Any, Any, Any],
        routing: RequestRouting | None,
    ) -> None:
        call.wait()
        try:
            reply = await answer
            if not method.reply_streams:
                call.only(parts_of(reply), _ok(call, routing))
            else:
                call.end(OK if method.request_streams else _ok(call, routing))
        except (ClientGone, asyncio.CancelledError):
            call.end(call.cut_off())
        except Exception as error:
            self._fail(method, call, error, routing)

    def _fail(
        self, method: Method, call: GrpcStream, error: Exception, routing: RequestRouting | None
    ) -> None:
        if isinstance(error, ModelportError):
            if is_late(error, call.deadline.remaining()):
                call.end(LATE)  # as the client's own clock says, whichever of the two is first
            else:
                call.end(Ending(status(method, error), str(error), _trailers(routing)))
        elif isinstance(error, MessageTooLarge):
            call.end(Ending(StatusCode.RESOURCE_EXHAUSTED, str(error)))
        elif isinstance(error, MalformedFrame):
            call.end(Ending(StatusCode.INTERNAL, str(error)))
        else:
            log.error("request failed", exc_info=error)
            call.end(INTERNAL)

    def _begin(self, method: Method, call: GrpcStream) -> Any:
        """Return the reply, or a coroutine of it, or one that sends the replies of a stream."""
        if method.reply_streams:
            return self._stream(method, call.target.encoding, call)
        if method.operation in LARGE_REPLIES:
            return self._in_turn(method, call)
        return self._unary(method, call)

    async def _in_turn(self, method: Method, call: GrpcStream) -> Any:
        """Return the reply, which may be large, when the client takes earlier ones."""
        async with call.connection.memory.turn():
            return await finished(self._unary(method, call))

    def _unary(self, method: Method, call: GrpcStream) -> Any:
        content = self._content(call.target.encoding, call.body())
        if len(content) > offload.INLINE_BYTES or type(content) is Compressed:
            return self._large(method, content, call.deadline)
        self._refuse(method, content)
        return method.handler(parse(method, content), call.deadline)

    async def _large(self, method: Method, content: Buffer, deadline: Deadline) -> Any:
        content = await self._bounded(method, content, deadline)
        self._refuse(method, content)
        if len(content) > offload.INLINE_BYTES:
            message = await _read(method, content, deadline)
        else:
            message = parse(method, content)
        return await finished(method.handler(message, deadline))

    def _refuse(self, method: Method, content: Buffer) -> None:
        if self.overloaded and method.refuses is not None and method.refuses(content):
            raise QueueFull

    def _content(self, encoding: bytes, body: bytes | memoryview) -> bytes | memoryview:
        """The only message of the request."""
        length = len(body) - framing.PREFIX_BYTES
        if length >= 0 and body[:5] == framing.prefix(length) and length <= self.max_message:
            return memoryview(body)[framing.PREFIX_BYTES :]
        return Frames(encoding, self.max_message).only(body)

    async def _stream(self, method: Method, encoding: bytes, call: GrpcStream) -> None:
        request_memory.reserve(STREAM_BYTES)
        if method.request_streams:
            # At once: a handler that does not read yet holds the client up.
            contents = call.messages(Frames(encoding, self.max_message))
            argument: Any = self._messages(method, contents, call)
        else:
            content = self._content(encoding, call.body())
            argument = await self._message(method, content, call.deadline)
        async with contextlib.aclosing(method.handler(argument, call.deadline)) as replies:
            async for each in replies:
                await call.message(each.SerializeToString())

    async def _messages(
        self, method: Method, contents: AsyncIterator[bytes], call: GrpcStream
    ) -> AsyncIterator[Any]:
        deadline = call.deadline
        async for content in contents:
            if self.access is not None and call.access is not None:
                self.access.renew(call.access)  # its credential may have ended during the stream
            try:
                if len(content) <= offload.INLINE_BYTES and type(content) is not Compressed:
                    message = parse(method, content)  # reserves nothing
                else:
                    with request_memory.own_lease():
                        message = await self._message(method, content, deadline)
            except ModelportError as error:
                if isinstance(error.__cause__, DecodeError):  # no message: the stream is damaged
                    raise
                message = RefusedMessage(error)
            yield message

    async def _message(self, method: Method, content: Buffer, deadline: Deadline) -> Any:
        if len(content) > offload.INLINE_BYTES or type(content) is Compressed:
            content = await self._bounded(method, content, deadline)
        if len(content) > offload.INLINE_BYTES:
            return await _read(method, content, deadline)
        return parse(method, content)

    async def _bounded(self, method: Method, content: Buffer, deadline: Deadline) -> Buffer:
        """``content`` without its compression, if it is no larger than a valid request is."""
        if type(content) is not Compressed:
            most = method.bound(content)
            if most is not None and len(content) > most:
                raise _larger_than_valid(most)
            return content
        if len(content) <= offload.INLINE_BYTES:
            with contextlib.suppress(MessageTooLarge):
                return content.plain(min(offload.INLINE_BYTES, self.max_message))
        most = method.bound(content.beginning())
        limit = self.max_message if most is None else most
        try:
            work = partial(content.plain, min(limit, self.max_message))
            return await offload.run(work, deadline)
        except MessageTooLarge as error:
            if most is not None and most < self.max_message:
                raise _larger_than_valid(most) from error
            raise


def _trailers(routing: RequestRouting | None) -> Headers:
    """Trailing metadata: the version that answered, if a rollout assigned the request, and what
    access adds."""
    context = CURRENT.get()
    record = None if context is None else context.record
    fields = () if record is None else tuple(record.response_headers)
    if routing is None or not routing.answered:
        return fields
    return ((request_routing.HEADER, routing.answered.encode()), *fields)


def _ok(call: GrpcStream, routing: RequestRouting | None) -> Ending:
    if routing is None and call.access is None:
        return OK
    trailers = _trailers(routing)
    return OK._replace(headers=trailers) if trailers else OK


async def _read(method: Method, content: Buffer, deadline: Deadline) -> Any:
    """The large message in ``content``."""
    found = method.glance(content)
    if found is not None:
        return found
    return await offload.run(partial(parse, method, content), deadline)


def _larger_than_valid(most: int) -> InvalidArgument:
    return InvalidArgument(
        f"the request is larger than {most} bytes, and no valid request for this method and model "
        "is"
    )
