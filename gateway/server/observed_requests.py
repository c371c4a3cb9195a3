"""Records of the requests of a listener that somebody observes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from modelport.gateway.access import context as access
from modelport.gateway.protocols.http_message import (
    Answer,
    Handler,
    Headers,
    HttpRequest,
    HttpResponse,
    Peer,
    RequestBody,
)
from modelport.gateway.server.grpc import framing
from modelport.gateway.telemetry.captured_traffic import CapturedTraffic
from modelport.gateway.telemetry.request_record import (
    CLIENT_CLOSED_REQUEST,
    CURRENT,
    GRPC,
    MESSAGES,
    REQUEST_ID,
    RequestObserver,
    RequestRecord,
)
from modelport.gateway.types import finished
from modelport.gateway.wire.raw_tensors import Buffer

if TYPE_CHECKING:
    from modelport.gateway.access.context import Fields
    from modelport.gateway.server.grpc.service import Ending


def begin(observer: RequestObserver, request: HttpRequest) -> RequestRecord | None:
    """Make the record of an HTTP request whose handler is about to be called."""
    captured = observer.capture()
    if captured is None:
        if observer.only_samples:
            return None
    else:
        query = b"?" + request.query if request.query else b""
        captured.target = request.raw_path + query
        captured.unread = request.body.whole
        request.body = _CapturedBody(request.body, captured)
    protocol, client = f"HTTP/{request.version}", _address(request.peer)
    return observer.begin(
        protocol, request.method, request.raw_path, request.fields, client, captured
    )


class _CapturedBody:
    """The body of a request that is recorded."""

    def __init__(self, body: RequestBody, captured: CapturedTraffic) -> None:
        self._body, self._captured = body, captured

    def whole(self) -> Buffer | None:
        content = self._body.whole()
        if content is not None:
            self._captured.received(content)
        return content

    async def read(self, most: int) -> Buffer:
        content = await self._body.read(most)
        self._captured.received(content)
        return content


def answered(record: RequestRecord, status: int, headers: Headers) -> Headers:
    """Note the status of the response; return its headers with the request's id."""
    record.status = status
    if record.captured is not None:
        record.captured.headers = headers
    return [*headers, (REQUEST_ID, record.request_id.encode())]


def sent(record: RequestRecord, received_bytes: int, body: Buffer, more: bool) -> None:
    """Note a part of the response, and that it was the last one."""
    record.response_bytes += len(body)
    if record.captured is not None and body:
        record.captured.sent(body)
    if not more:
        record.request_bytes, status = received_bytes, record.status
        record.end(status, is_failure=status >= 400 or bool(record.error))


def abandoned(record: RequestRecord, received_bytes: int) -> None:
    """Note that the client has gone before its response was complete."""
    record.request_bytes = received_bytes
    record.failed("the client has disconnected")
    record.end(record.status or CLIENT_CLOSED_REQUEST, is_failure=True)


def refused(
    observer: RequestObserver,
    method: str,
    path: bytes,
    fields: Mapping[bytes, bytes],
    peer: Peer,
    error: tuple[str, str],
) -> None:
    """Give the observer the record of a request that no handler sees."""
    path = path.partition(b"?")[0]
    record = observer.begin("HTTP", method, path, fields, _address(peer), observer.capture())
    status, message = error
    if record is not None:
        record.failed(message)
        record.end(int(status[:3]), is_failure=True)


def begin_call(
    observer: RequestObserver, path: bytes, fields: Fields, peer: tuple[str, int] | None
) -> RequestRecord | None:
    """Make the record of a gRPC call, whose handler is to run in the record's context."""
    captured = observer.capture()
    if captured is None and observer.only_samples and path != MESSAGES:
        return None
    client = peer[0] if peer else ""
    return observer.begin(GRPC, "", path, dict(fields), client, captured)


def received(record: RequestRecord, body: Buffer) -> None:
    """Note the body of a call with one message, which has its prefix."""
    record.request_bytes = len(body)
    if record.captured is not None:
        record.captured.received(body)


def received_message(record: RequestRecord, content: bytes) -> None:
    """Note one of several messages of a call."""
    record.request_bytes += len(content) + framing.PREFIX_BYTES
    if record.captured is not None:
        record.captured.received_message(content, type(content) is framing.Compressed)


def sent_message(record: RequestRecord, parts: Sequence[Buffer]) -> None:
    """Note a message of the reply."""
    record.response_bytes += sum(map(len, parts)) + framing.PREFIX_BYTES
    if record.captured is not None:
        record.captured.sent_message(parts)


def end_call(record: RequestRecord, ending: Ending) -> Ending:
    """End the record of a call; return its ending with the request's id."""
    if ending.status:
        record.failed(ending.message)
    record.end(0, ending.status.name, ending.status != 0)
    return ending._replace(headers=(*ending.headers, (REQUEST_ID, record.request_id.encode())))


def observing(handler: Handler, observer: RequestObserver) -> Handler:
    """Give the observer the inference requests to ``handler``, whose listener has no observer."""

    def both(request: HttpRequest) -> Answer:
        protocol = f"HTTP/{request.version}"
        infers = (
            observer.active and observer.describe(protocol, request.method, request.raw_path).infers
        )
        return _observed(handler, observer, request) if infers else handler(request)

    return both


async def _observed(
    handler: Handler, observer: RequestObserver, request: HttpRequest
) -> HttpResponse:
    record = begin(observer, request)
    if record is None:
        return await finished(handler(request))
    CURRENT.set(record)
    context = access.CURRENT.get()  # a listener may authenticate before
    if context is not None:
        record.caller = context.principal.name
    stated = request.fields.get(b"content-length", b"0")
    size = int(stated) if stated.isdigit() and len(stated) < 20 else 0
    try:
        response = await finished(handler(request))
    except BaseException:
        abandoned(record, size)
        raise
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        record.error = ""  # that of the cancelled handler
        abandoned(record, size)
        return response
    if response.parts is not None:  # a stream, whose parts pass unseen
        record.captured = None
    headers = answered(record, response.status, response.headers)
    sent(record, size, response.body, more=False)
    return HttpResponse(response.status, response.body, headers, response.parts)


def _address(peer: Peer) -> str:
    return peer.client[0] if peer.client is not None else ""
