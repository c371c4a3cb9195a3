"""Predictions over plain ASGI: a request becomes a ``Call``, a ``Reply`` or an error an answer.

TorchServe, SageMaker and Vertex differ in two things, which are a ``Wire``: how a request says
where its JSON part ends and an answer says it back, and how an error looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import orjson
import structlog

from gateway.errors import Internal, InvalidArgument, ModelportError, Unavailable
from gateway.protocols import http_body
from gateway.protocols.asgi import Receive, Scope, Send
from gateway.protocols.http_reply import JSON, RETRY, Headers, reply
from gateway.protocols.oip.http import STATUS
from gateway.protocols.prediction import form_body
from gateway.protocols.prediction.predictor import Call, Predict, Reply
from gateway.types import NO_DEADLINE

log = structlog.get_logger("modelport.http")

#: A request's headers, names in lower case.
RequestHeaders = dict[bytes, bytes]
TRACE = b"x-request-id"
MAX_TRACE = 128
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
class PredictionHandler:
    """Answers the request to predict with a model, given by whoever routes."""

    predict: Predict
    wire: Wire
    max_input_bytes: int

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
            encoding = headers.get(b"content-encoding", b"")
            body = await http_body.read(receive, self.max_input_bytes, encoding)
            name, version = find(headers)
            answer = await self.predict(self._call(name, version, body, headers), NO_DEADLINE)
        except ModelportError as error:
            await self._fail(send, error, headers)
        except http_body.Disconnected:
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

    async def _fail(self, send: Send, error: ModelportError, headers: RequestHeaders) -> None:
        status, body, reply_headers = self.wire.failure(error, headers)
        if status == 503:
            reply_headers = [*reply_headers, *RETRY]
        log.debug("request failed", status=status, error=str(error))
        await reply(send, status, body, reply_headers)


@dataclass(frozen=True, slots=True)
class PlatformWire:
    """Triton's, for SageMaker and Vertex: the size of the JSON part is in the content type."""

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
        return http_body.header_length(header[len(prefix) :], size)

    def headers(self, reply: Reply, request: RequestHeaders) -> Headers:
        if reply.header_length is None:
            return [(b"content-type", reply.content_type)]
        size = b"%d" % reply.header_length
        return [(b"content-type", self.media_type + JSON_HEADER_SIZE + size)]

    def failure(self, error: ModelportError, request: RequestHeaders) -> tuple[int, bytes, Headers]:
        return STATUS[error.code], orjson.dumps({"error": str(error)}), JSON
