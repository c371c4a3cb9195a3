"""The generate extension over HTTP: ``/generate`` and ``/generate_stream``.

A stream consists of server-sent events, one for each response. An error before the first response
sets the status; a later one is the last event, ``{"error": ...}``.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import orjson
from fastapi import Depends, FastAPI, Response

from modelport.gateway.errors import Code, Internal, ModelportError
from modelport.gateway.protocols import request_body, response_encoding
from modelport.gateway.protocols.asgi import Receive, Scope, Send
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http import Delegate
from modelport.gateway.protocols.http_operations import INFER
from modelport.gateway.protocols.http_response import FAILURES, JSON, Headers, error_of, reply
from modelport.gateway.protocols.oip import generate_json, metadata
from modelport.gateway.protocols.oip import parameters as oip_parameters
from modelport.gateway.protocols.oip import schema as oip_schema
from modelport.gateway.protocols.oip.http import MODEL_PATHS, Selected
from modelport.gateway.protocols.oip.http_errors import STATUS, OipErrors, refuse_failed
from modelport.gateway.runtime import offload
from modelport.gateway.types import Deadline, InferResponse
from modelport.gateway.wire.deadline_headers import http_deadline
from modelport.gateway.wire.raw_tensors import Buffer

_PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/([0-9]+))?/generate(_stream)?", re.ASCII)
_EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class EventStream(Response):
    """A response of events; FastAPI documents its media type."""

    media_type = "text/event-stream"


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

    def serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None] | None:
        found = _PATH.fullmatch(scope["path"]) if scope["method"] == "POST" else None
        if found is None:
            return None
        answer = self._events if found[3] else self._once
        return self._serve(answer, found[1], found[2] or "", scope, receive, send)

    async def _serve(
        self,
        answer: Callable[[AsyncGenerator[InferResponse, None], Send, Deadline], Awaitable[None]],
        name: str,
        version: str,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Run the model and pass its responses to ``answer``; send errors that occur before."""
        try:
            headers = dict(scope["headers"])
            deadline = http_deadline(headers)
            number = metadata.parse_version(version)
            served = self._manager.get(name, number)
            bound = served.validator.max_bytes
            body = await request_body.read(receive, headers, self._max_input_bytes, deadline, bound)
            work = partial(generate_json.decode, body, served, number)
            large = len(body) > offload.INLINE_BYTES
            request = await offload.run(work, deadline) if large else work()
            request.trace = headers.get(b"x-request-id", b"")[:128].decode("latin-1")
            deadline = oip_parameters.deadline(request, deadline)
            async with aclosing(self._service.stream(request, deadline)) as responses:
                await answer(responses, send, deadline)
        except FAILURES as failure:
            await refuse_failed(send, failure)

    async def _once(
        self, responses: AsyncGenerator[InferResponse, None], send: Send, deadline: Deadline
    ) -> None:
        first, more = await anext(responses, None), None
        if first is not None:
            body = await _encoded(generate_json.encode, first, deadline)
            more = await anext(responses, None)
        if first is None or more is not None:
            raise Internal(
                "generate expects model to produce exactly 1 response, use generate stream for "
                "model that generates various number of responses"
            )
        await reply(send, 200, body, JSON)

    async def _events(
        self, responses: AsyncGenerator[InferResponse, None], send: Send, deadline: Deadline
    ) -> None:
        status = 200
        event: Buffer = b""
        try:
            first = await anext(responses, None)
            if first is not None:
                event = await _encoded(generate_json.event, first, deadline)
        except ModelportError as error:
            if error.code is not Code.INTERNAL:
                raise  # the inference did not begin
            status, event = STATUS[error.code], _failure(str(error))
        start = {"type": "http.response.start", "status": status, "headers": _EVENTS}
        try:
            await send(start)
            while event:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                response = await anext(responses, None)
                event = b""
                if response is not None:
                    event = await _encoded(generate_json.event, response, deadline)
        except FAILURES as failure:
            event = _failure(str(error_of(failure)))
        await send({"type": "http.response.body", "body": event})

    # -- documentation --------------------------------------------------------------------------

    def add_routes(self, app: FastAPI) -> None:
        """Document the routes, which ``serve`` answers."""
        for path, suffix, select in MODEL_PATHS:
            for ending, answer, text, documented in (
                ("generate", self._once, "One response, as JSON: outputs by name.", {}),
                (
                    "generate_stream",
                    self._events,
                    "Any number of responses, as events (SSE).",
                    _STREAMED,
                ),
            ):
                decorator = app.post(
                    f"{path}/{ending}",
                    tags=["inference"],
                    dependencies=INFER,
                    name=ending + suffix,
                    description=f"{text} The request is an object of inputs by name.",
                    openapi_extra=oip_schema.ANY_BODY,
                    **documented,
                )
                decorator(self._route(answer, select))

    def _route(
        self, answer: Callable[..., Awaitable[None]], select: Callable[..., Selected]
    ) -> Callable[..., Awaitable[Response]]:
        async def route(selected: Selected = Depends(select)) -> Response:
            name, number = selected
            return Delegate(self._serve, answer, name, str(number or ""))

        return route


async def _encoded(
    encode: Callable[[InferResponse], Buffer], response: InferResponse, deadline: Deadline
) -> Buffer:
    return await response_encoding.encode(partial(encode, response), response.outputs, deadline)


def _failure(message: str) -> bytes:
    return b"data: %b\n\n" % orjson.dumps({"error": message})
