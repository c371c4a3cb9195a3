"""The generate extension over HTTP: ``/generate`` and ``/generate_stream``.

A stream consists of server-sent events, one for each response. An error before the first response
sets the status; a later one is the last event, ``{"error": ...}``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import orjson
from fastapi import Response

from modelport.gateway.errors import Code, Internal, ModelportError
from modelport.gateway.protocols import request_body, response_encoding
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http import DialectRoute
from modelport.gateway.protocols.http_message import Answer, Headers, HttpRequest, HttpResponse
from modelport.gateway.protocols.http_response import error_of
from modelport.gateway.protocols.oip import generate_json, metadata
from modelport.gateway.protocols.oip import parameters as oip_parameters
from modelport.gateway.protocols.oip import schema as oip_schema
from modelport.gateway.protocols.oip.http import model_routes
from modelport.gateway.protocols.oip.http_errors import STATUS, OipErrors
from modelport.gateway.runtime import offload
from modelport.gateway.types import Deadline, InferResponse
from modelport.gateway.wire.deadline_headers import http_deadline
from modelport.gateway.wire.raw_tensors import Buffer

_ONCE, _EVENTS_TEXT = (
    f"{text} The request is an object of inputs by name."
    for text in (
        "One response, as JSON: outputs by name.",
        "Any number of responses, as events (SSE).",
    )
)
_EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class EventStream(Response):
    """A response of events; FastAPI documents its media type."""

    media_type = "text/event-stream"


_Answer = Callable[
    [AsyncGenerator[InferResponse, None], Deadline], Coroutine[Any, Any, HttpResponse]
]
#: A model may fail after the request was accepted.
_STREAMED: dict[str, Any] = {
    "response_class": EventStream,
    "responses": {status: {"content": {EventStream.media_type: {}}} for status in (500, 503)},
}


class GenerateHttp(OipErrors):
    """The routes of ``/v2/models/MODEL/generate`` and ``generate_stream``."""

    segments = frozenset({"v2"})

    def __init__(self, host: DialectHost) -> None:
        self._service = host.service
        self._manager = host.manager
        self._max_input_bytes = host.max_input_bytes
        #: Handlers by the last part of the path.
        self.handlers: Mapping[str, Callable[[str, str, HttpRequest], Answer]] = {
            "generate": partial(self._serve, self._once),
            "generate_stream": partial(self._serve, self._events),
        }
        self.table = self._routes()

    def _routes(self) -> Sequence[DialectRoute]:
        once, events = self.handlers.values()
        body = {"openapi_extra": oip_schema.ANY_BODY}
        return (
            *model_routes("generate", once, _ONCE, **body),
            *model_routes("generate_stream", events, _EVENTS_TEXT, **body, **_STREAMED),
        )

    async def _serve(
        self, answer: _Answer, name: str, version: str, request: HttpRequest
    ) -> HttpResponse:
        """Run the model and pass its responses to ``answer``."""
        deadline = http_deadline(request.fields)
        number = metadata.parse_version(version)
        served = self._manager.get(name, number)
        bound = served.validator.max_bytes
        body = await request_body.read(request, self._max_input_bytes, deadline, bound)
        work = partial(generate_json.decode, body, served, number)
        large = len(body) > offload.INLINE_BYTES
        asked = await offload.run(work, deadline) if large else work()
        asked.trace = request.trace
        deadline = oip_parameters.deadline(asked, deadline)
        return await answer(self._service.stream(asked, deadline), deadline)

    async def _once(
        self, responses: AsyncGenerator[InferResponse, None], deadline: Deadline
    ) -> HttpResponse:
        async with aclosing(responses):
            first, more = await anext(responses, None), None
            if first is not None:
                body = await _encoded(generate_json.encode, first, deadline)
                more = await anext(responses, None)
            if first is None or more is not None:
                raise Internal(
                    "generate expects model to produce exactly 1 response, use generate stream for "
                    "model that generates various number of responses"
                )
            return HttpResponse(200, body)

    async def _events(
        self, responses: AsyncGenerator[InferResponse, None], deadline: Deadline
    ) -> HttpResponse:
        events = _events(responses, deadline)
        try:
            first = await anext(events, b"")
        except ModelportError as error:
            if error.code is not Code.INTERNAL:
                raise  # the inference did not begin
            return HttpResponse(STATUS[error.code], _failure(str(error)), _EVENTS)
        return HttpResponse(200, first, _EVENTS, events)


async def _events(
    responses: AsyncGenerator[InferResponse, None], deadline: Deadline
) -> AsyncGenerator[Buffer, None]:
    """Encode each response as an event; an error after the first one is the last event."""
    index = 0
    async with aclosing(responses):
        try:
            async for response in responses:
                event = await _encoded(generate_json.event, response, deadline)
                index += 1
                yield event
        except (Exception, asyncio.CancelledError) as failure:
            if not index:
                raise
            yield _failure(str(error_of(failure)))


async def _encoded(
    encode: Callable[[InferResponse], Buffer], response: InferResponse, deadline: Deadline
) -> Buffer:
    return await response_encoding.encode(partial(encode, response), response.outputs, deadline)


def _failure(message: str) -> bytes:
    return b"data: %b\n\n" % orjson.dumps({"error": message})
