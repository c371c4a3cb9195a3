"""Predictions over plain ASGI: a request becomes a ``Call``, a ``Reply`` or an error an answer.

TorchServe, SageMaker and Vertex differ in two things, which are a ``Wire``: how a request says
where its JSON part ends and an answer says it back, and how an error looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

import orjson
import structlog

from modelport.gateway.errors import Internal, InvalidArgument, ModelportError, Unavailable
from modelport.gateway.protocols import http_request
from modelport.gateway.protocols.asgi import Receive, Scope, Send
from modelport.gateway.protocols.http_response import JSON, RETRY, Headers, reply
from modelport.gateway.protocols.oip.infer_http import STATUS
from modelport.gateway.protocols.prediction import form_body
from modelport.gateway.protocols.prediction.predictor import Call, Predict, PredictStream, Reply

log = structlog.get_logger("modelport.http")

#: A request's headers, names in lower case.
RequestHeaders = dict[bytes, bytes]
TRACE = b"x-request-id"
MAX_TRACE = 128
HEADER_LENGTH = b"inference-header-content-length"
#: What comes before the size of the JSON part in Triton's content types for these platforms.
JSON_HEADER_SIZE = b".binary+json;json-header-size="


class Wire(Protocol):
    """What a dialect has of its own."""

    def header_length(self, headers: RequestHeaders, size: int) -> int | None:
        """The size of the JSON part of a body of ``size`` bytes; None: the request does not say.

        Raises:
            InvalidArgument: it says what cannot be.
        """

    def headers(self, reply: Reply, request: RequestHeaders) -> Headers:
        """Of an answer with status 200."""

    def failure(self, error: ModelportError, request: RequestHeaders) -> tuple[int, bytes, Headers]:
        """Status, body and headers of an error."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """How a dialect streams: of which model (name and version), and what."""

    applies: Callable[[str, int], bool]
    stream: PredictStream


@dataclass(frozen=True, slots=True)
class PredictionHandler:
    """Answers the request to predict with a model, given by whoever routes.

    Without ``streaming`` a decoupled model is refused.
    """

    predict: Predict
    wire: Wire
    max_input_bytes: int
    #: The most bytes of a valid request for a model (name and version); it raises if there is none.
    bound: Callable[[str, int], int | None]
    streaming: Streaming | None = None

    async def __call__(
        self,
        find: Callable[[RequestHeaders], tuple[str, int]],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """``find`` gives the model's name and version; it may raise ``ModelportError``."""
        headers = dict(scope["headers"])
        try:
            deadline = http_request.deadline(headers)
            name, version = find(headers)
            bound = self.bound(name, version)
            body = await http_request.read(receive, headers, self.max_input_bytes, deadline, bound)
            call = self._call(name, version, body, headers)
            if self.streaming is not None and self.streaming.applies(name, version):
                await self._stream(self.streaming.stream(call, deadline), headers, send)
                return
            answer = await self.predict(call, deadline)
        except ModelportError as error:
            await self._fail(send, error, headers)
        except http_request.ClientDisconnected:
            pass
        except asyncio.CancelledError:  # the front does it at the end of the exit timeout
            await self._fail(send, Unavailable("the server is shutting down"), headers)
        except Exception:
            log.exception("request failed")
            await self._fail(send, Internal("internal error"), headers)
        else:
            await reply(send, 200, answer.body, self.wire.headers(answer, headers))

    def _call(self, name: str, version: int, body: bytes, headers: RequestHeaders) -> Call:
        header = headers.get(b"content-type", b"")
        content_type = form_body.media_type(header)
        trace = headers.get(TRACE, b"")[:MAX_TRACE].decode("latin-1")
        length = None
        if form_body.is_form(content_type):
            field = form_body.data_field(body, header)
            body, content_type = field.content, field.content_type
        else:
            length = self.wire.header_length(headers, len(body))
        return Call(name, version, body, content_type, length, trace)

    async def _stream(
        self, replies: AsyncGenerator[Reply, None], headers: RequestHeaders, send: Send
    ) -> None:
        """Every reply as it comes, in parts of one body. One that fails is cut off: then the
        connection ends before the body does, and no client takes it for whole."""
        async with aclosing(replies):
            first = await anext(replies, None)
            answer = replace(first or Reply(b""), header_length=None)
            start = self.wire.headers(answer, headers)
            await send({"type": "http.response.start", "status": 200, "headers": start})
            part = first
            try:
                while part is not None:
                    body = {"type": "http.response.body", "body": part.body, "more_body": True}
                    await send(body)
                    part = await anext(replies, None)
            except (ModelportError, asyncio.CancelledError) as error:
                log.info("a stream is cut off", error=str(error) or "shutting down, or no client")
                return
            await send({"type": "http.response.body", "body": b""})

    async def _fail(self, send: Send, error: ModelportError, headers: RequestHeaders) -> None:
        status, body, reply_headers = self.wire.failure(error, headers)
        if status == 503:
            reply_headers = [*reply_headers, *RETRY]
        log.debug("request failed", status=status, error=str(error))
        await reply(send, status, body, reply_headers)


@dataclass(frozen=True, slots=True)
class PlatformWire:
    """Triton's, for SageMaker and Vertex: the size of the JSON part is in the content type.

    A reply has it as a header too: Triton's own replies on Vertex have it only there.
    """

    #: ``application/vnd.PLATFORM-triton``
    media_type: bytes

    def header_length(self, headers: RequestHeaders, size: int) -> int | None:
        prefix = self.media_type + JSON_HEADER_SIZE
        header = headers.get(b"content-type", b"")
        if prefix not in header:
            return None
        if not header.startswith(prefix):
            raise InvalidArgument(
                f"expect MIME type for binary data starts with '{prefix.decode()}', got: "
                f"{header[:200].decode('latin-1')}"
            )
        return http_request.header_length(header[len(prefix) :], size)

    def headers(self, reply: Reply, request: RequestHeaders) -> Headers:
        if reply.header_length is None:
            return [(b"content-type", reply.content_type)]
        size = b"%d" % reply.header_length
        kind = self.media_type + JSON_HEADER_SIZE + size
        return [(b"content-type", kind), (HEADER_LENGTH, size)]

    def failure(self, error: ModelportError, request: RequestHeaders) -> tuple[int, bytes, Headers]:
        return STATUS[error.code], orjson.dumps({"error": str(error)}), JSON
