"""Predictions over HTTP.

The protocols of TorchServe, SageMaker and Vertex AI differ in a ``PredictionDialect``: in the
headers that state the size of the JSON part.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.protocols import request_body
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http_message import Headers, HttpRequest, HttpResponse
from modelport.gateway.protocols.prediction import form_body
from modelport.gateway.protocols.prediction.predictor import (
    PredictionCall,
    PredictionReply,
    Predictor,
)
from modelport.gateway.runtime import offload
from modelport.gateway.types import Deadline
from modelport.gateway.wire.deadline_headers import http_deadline
from modelport.gateway.wire.raw_tensors import Buffer

#: A request's headers, names in lower case.
RequestHeaders = dict[bytes, bytes]
#: Prefix of the JSON part's size in Triton's content types for these platforms.
JSON_HEADER_SIZE = b".binary+json;json-header-size="


class PredictionDialect(Protocol):
    """The headers of a protocol."""

    def header_length(self, headers: RequestHeaders, size: int) -> int | None:
        """Read the size of the JSON part of a body of ``size`` bytes, or None if it is not stated.

        Raises:
            InvalidArgument: The stated size is invalid.
        """

    def headers(self, reply: PredictionReply, request: RequestHeaders) -> Headers:
        """Make the headers of a successful response."""


class PredictionTarget(NamedTuple):
    """The requested model; ``label`` is the one that chose the version, if any did."""

    name: str
    version: int = 0
    label: str | None = None


@dataclass(frozen=True, slots=True)
class PredictionHandler:
    """Handler of prediction requests. If it does not stream, it refuses decoupled models."""

    predictor: Predictor
    dialect: PredictionDialect
    max_input_bytes: int
    streams: bool = False

    async def __call__(
        self, find: Callable[[RequestHeaders], PredictionTarget], request: HttpRequest
    ) -> HttpResponse:
        """Answer a request; ``find`` returns the requested model, or raises."""
        headers = request.fields
        deadline = http_deadline(headers)
        name, version, _ = selected = find(headers)
        bound = self.predictor.max_bytes(name, version)
        body = await request_body.read(request, self.max_input_bytes, deadline, bound)
        call = await self._call(selected, body, request, deadline)
        if self.streams and self.predictor.is_decoupled(name, version):
            return await self._stream(self.predictor.stream(call, deadline), headers)
        answer = await self.predictor(call, deadline)
        return HttpResponse(200, answer.body, self.dialect.headers(answer, headers))

    async def _call(
        self, selected: PredictionTarget, body: bytes, request: HttpRequest, deadline: Deadline
    ) -> PredictionCall:
        headers = request.fields
        header = headers.get(b"content-type", b"")
        content_type = form_body.media_type(header)
        length = None
        if form_body.is_form(content_type, body):
            find = partial(form_body.data_field, body, header)
            long = len(body) > offload.INLINE_BYTES
            field = await offload.run(find, deadline) if long else find()
            body, content_type = field.content, field.content_type
        else:
            length = self.dialect.header_length(headers, len(body))
        name, version, label = selected
        return PredictionCall(name, version, body, content_type, length, request.trace, label)

    async def _stream(
        self, replies: AsyncGenerator[PredictionReply, None], headers: RequestHeaders
    ) -> HttpResponse:
        """Make a response whose parts are the replies."""
        first = await anext(replies, PredictionReply(b""))
        parts = _bodies(first, replies)
        start = self.dialect.headers(replace(first, header_length=None), headers)
        return HttpResponse(200, await anext(parts), start, parts)


async def _bodies(
    first: PredictionReply, replies: AsyncGenerator[PredictionReply, None]
) -> AsyncGenerator[Buffer, None]:
    async with aclosing(replies):
        yield first.body
        async for reply in replies:
            yield reply.body


@dataclass(frozen=True, slots=True)
class PlatformDialect:
    """Triton's dialect for SageMaker and Vertex AI: the content type has the JSON part's size.

    A response also has it as a header, where Triton puts it on Vertex AI.
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
        return request_body.header_length(header[len(prefix) :], size)

    def headers(self, reply: PredictionReply, request: RequestHeaders) -> Headers:
        if reply.header_length is None:
            return [(b"content-type", reply.content_type)]
        size = b"%d" % reply.header_length
        kind = self.media_type + JSON_HEADER_SIZE + size
        return [(b"content-type", kind), (request_body.HEADER_LENGTH, size)]


def platform_handler(host: DialectHost, media_type: bytes) -> PredictionHandler:
    """The handler of the platform whose content types begin with ``media_type``."""
    return PredictionHandler(host.predictor, PlatformDialect(media_type), host.max_input_bytes)
