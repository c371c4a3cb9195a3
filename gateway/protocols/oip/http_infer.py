"""OIP over HTTP: inference and the server's probes, as plain ASGI.

``OipHttp`` documents these routes.
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import lru_cache, partial

from fastapi import Response

from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import Code, Decoupled, ModelportError, QueueFull
from modelport.gateway.protocols import cloud_events, request_body, response_encoding
from modelport.gateway.protocols.asgi import Receive, Scope, Send
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http import HttpDialect
from modelport.gateway.protocols.http_response import (
    FAILURES,
    JSON,
    document,
    error_of,
    refuse,
    reply,
)
from modelport.gateway.protocols.oip import http_request, http_response, metadata, request_template
from modelport.gateway.protocols.oip import parameters as oip_parameters
from modelport.gateway.runtime import offload
from modelport.gateway.types import InferRequest
from modelport.gateway.wire.deadline_headers import http_deadline

STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.ALREADY_EXISTS: 400,
    Code.CANCELLED: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.QUOTA_EXCEEDED: 429,
    Code.INTERNAL: 500,
    Code.UNSUPPORTED: 501,
    Code.UNAVAILABLE: 503,
}
_DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
_PREFIX, _SUFFIX, _VERSIONS = "/v2/models/", "/infer", "/versions/"
#: Number of cached paths, and their maximum length.
TARGETS, KEPT_TARGET = 1024, 512
#: Longer version numbers are left to ``parse_version``.
_DIGITS = 18
#: A look-up of an enum's member calls a function.
_HEALTH, _INFER = Operation.HEALTH, Operation.INFER
_LIVE, _READY = "/v2/health/live", "/v2/health/ready"
_PROBED = frozenset({_LIVE, _READY})
#: Bodies of the Open Inference Protocol; Triton sends none.
_PROBES = {
    (_LIVE, True): b'{"live":true}',
    (_READY, True): b'{"ready":true}',
    (_READY, False): b'{"ready":false}',
}


class OipErrors(HttpDialect):
    """Error responses of the Open Inference Protocol, which other dialects share."""

    statuses = frozenset(STATUS.values())

    def failure(self, error: ModelportError) -> Response:
        return document({"error": str(error)}, STATUS[error.code])


async def refuse_failed(send: Send, failure: BaseException) -> None:
    """Send the error response to a request whose handler failed."""
    error = error_of(failure)
    if error is not None:
        await refuse(send, STATUS[error.code], str(error))


class OipInfer(OipErrors):
    """Inference and probes of ``/v2``."""

    def __init__(self, host: DialectHost) -> None:
        self._shared = host.shared
        self._service = host.service
        self._manager = host.manager
        self._control = host.control
        self._max_input_bytes = host.max_input_bytes

    def serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None] | None:
        path: str = scope["path"]
        if path in _PROBED and scope["method"] == "GET":
            return self._probe(path, send)
        if scope["method"] == "POST" and path.endswith(_SUFFIX):
            target = (_target if len(path) <= KEPT_TARGET else _parsed)(path)
            if target is not None:
                return self._infer(*target, scope, receive, send)
        return None

    def operation(self, scope: Scope) -> Operation:
        return _HEALTH if scope["path"] in _PROBED else _INFER

    def refuses(self, raw_path: bytes) -> bool:
        """Ask ``InferenceService.refuses`` for a plain path of ``infer``."""
        target = _parsed(raw_path.decode("ascii", "replace"))
        if target is None:
            return False
        name, version = target
        number = int(version) if version and len(version) < _DIGITS else 0
        if version and not number:
            return False
        return self._service.refuses(name, number)

    async def _probe(self, path: str, send: Send) -> None:
        good = path == _LIVE or await self._control.ready()
        await reply(send, 200 if good else 400, _PROBES[path, good], JSON)

    # -- infer ----------------------------------------------------------------------------------

    async def _infer(
        self, name: str, version: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            number = metadata.parse_version(version)
            served = self._manager.get(name, number)
            if served.refuses():
                served.statistics.failed(Code.UNAVAILABLE, 0)
                raise QueueFull
            headers = dict(scope["headers"])
            deadline = http_deadline(headers)
            bound = served.validator.max_bytes
            if cloud_events.is_event(headers):
                receive, send = await cloud_events.exchange(
                    name, headers, receive, send, self._max_input_bytes, deadline, bound
                )
            body = await request_body.read(receive, headers, self._max_input_bytes, deadline, bound)
            if len(body) <= offload.INLINE_BYTES:
                request, form = self._decode(body, headers, name, number)
            else:
                plain = self._glance(body, headers, name, number)
                if plain is None:
                    decode = partial(self._decode, body, headers, name, number)
                    plain = await offload.run(decode, deadline)
                request, form = plain
            trace = headers.get(b"x-request-id")
            if trace:
                request.trace = trace[:128].decode("latin-1")
            deadline = oip_parameters.deadline(request, deadline)
            response = await self._service.infer(request, deadline)
            if http_response.is_large(response, form):
                work = partial(http_response.encode, response, form)
                json, blobs = await response_encoding.encode(work, response.outputs, deadline)
            else:
                json, blobs = http_response.encode(response, form)
        except Decoupled:
            await refuse(send, 501, _DECOUPLED)
        except FAILURES as failure:
            await refuse_failed(send, failure)
        else:
            reply_headers = JSON
            if blobs:
                json, header_length = http_response.joined(json, blobs)
                if header_length:
                    reply_headers = [
                        (b"content-type", b"application/octet-stream"),
                        (request_body.HEADER_LENGTH, b"%d" % header_length),
                    ]
            accepted = headers.get(b"accept-encoding")
            coding = request_body.chosen_coding(accepted, len(json)) if accepted else None
            if coding:
                json = await request_body.compress(json, coding)
                reply_headers = [*reply_headers, (b"content-encoding", coding)]
            await reply(send, 200, json, reply_headers)

    def _glance(
        self, body: bytes, headers: dict[bytes, bytes], name: str, version: int
    ) -> tuple[InferRequest, http_response.ResponseFormat] | None:
        stated = headers.get(request_body.HEADER_LENGTH)
        if stated is None:
            return None
        length = request_body.header_length(stated, len(body))
        return request_template.glance(body, length, name, version) if length else None

    def _decode(
        self, body: bytes, headers: dict[bytes, bytes], name: str, version: int
    ) -> tuple[InferRequest, http_response.ResponseFormat]:
        header_length = len(body)
        stated = headers.get(request_body.HEADER_LENGTH)
        if stated is not None:
            header_length = request_body.header_length(stated, len(body))
            if not header_length:
                validator = self._manager.get(name, version).validator
                spec, shape = validator.raw_input(len(body))
                return http_request.decode_raw(body, spec, shape, name, version)
        plain = request_template.decode(body, header_length, name, version)
        if plain is not None:
            return plain
        return http_request.decode(body, header_length, name, version, self._shared.transfer())


def _parsed(path: str) -> tuple[str, str] | None:
    """Parse the model and the version of a path of ``infer``, or return None."""
    if not path.startswith(_PREFIX) or not path.endswith(_SUFFIX):
        return None
    name, versions, version = path[len(_PREFIX) : -len(_SUFFIX)].partition(_VERSIONS)
    good = name and "/" not in name and (not versions or is_number(version))
    return (name, version) if good else None


_target = lru_cache(TARGETS)(_parsed)


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
