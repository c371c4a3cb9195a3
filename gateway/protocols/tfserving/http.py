"""TensorFlow Serving over REST: ``/v1/models``.

Specification: TensorFlow Serving's ``g3doc/api_rest.md``, ``http_rest_api_handler.cc`` and
``http_rest_api_util.cc``: paths are case-insensitive, and unknown ones get 400. KServe's v1
protocol has the same paths; its additions (``protocol/rest/v1_endpoints.py``) are supported too:
the list of models, ``ready`` and ``:explain``.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Path, Response
from google.protobuf import json_format

from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import InvalidArgument, ModelportError
from modelport.gateway.protocols import (
    cloud_events,
    encoded_inputs,
    request_body,
    response_encoding,
)
from modelport.gateway.protocols.asgi import document
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http import DialectRoute, HttpDialect, PathPart, Route
from modelport.gateway.protocols.http_message import HttpRequest, HttpResponse
from modelport.gateway.protocols.http_operations import HEALTH
from modelport.gateway.protocols.http_response import error_of
from modelport.gateway.protocols.tfserving import examples_json as tfserving_examples_json
from modelport.gateway.protocols.tfserving import predict_json, results
from modelport.gateway.protocols.tfserving import schema as tfserving_schema
from modelport.gateway.protocols.tfserving.inference import (
    CLASSIFY,
    REGRESS,
    ExampleMethod,
    Inference,
    TfServingCall,
)
from modelport.gateway.protocols.tfserving.servable_signatures import Selected, code
from modelport.gateway.runtime import offload
from modelport.gateway.types import Deadline, finished
from modelport.gateway.wire.deadline_headers import http_deadline
from modelport.gateway.wire.raw_tensors import Buffer

STATUS = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_PARTS = {
    "model": PathPart(Annotated[str, Path(description="Model name")], "[^/:]+"),
    "version": PathPart(Annotated[int, Path()], "[0-9]+"),
    "label": PathPart(Annotated[str, Path()], "[^/:]+"),
}
#: Methods with examples, and the writers of their results.
_EXAMPLE_METHODS: dict[str, tuple[ExampleMethod, Callable[[Any], Buffer]]] = {
    "classify": (CLASSIFY, results.classification_json),
    "regress": (REGRESS, results.regression_json),
}
_OPERATIONS = {"GET": Operation.METADATA, "POST": Operation.INFER}
_MAX_VERSION = 2**63 - 1
_EVENT: dict[int | str, dict[str, Any]] = {200: {"content": {cloud_events.MEDIA_TYPE.decode(): {}}}}


class TfServingHttp(HttpDialect):
    """The routes of ``/v1/models``."""

    segments = frozenset({"v1", "V1"})
    statuses = frozenset(STATUS.values())

    def __init__(self, host: DialectHost) -> None:
        self._inference = Inference(host)
        self._max_input_bytes = host.max_input_bytes
        self.table = [*self._routes()]

    def _routes(self) -> Iterator[DialectRoute]:
        """The routes of models, versions and labels; a path without a model has its own error."""
        models = {"name": "models", "description": "Models that are READY.", "tags": ["KServe"]}
        yield self._row("GET", "", "", models)
        for model in ("/{model}", ""):
            for chosen, suffix in (
                ("", ""),
                ("/versions/{version}", " of a version"),
                ("/labels/{label}", " of a label"),
            ):
                for ending, name, body, text in tfserving_schema.ROUTES:
                    documented = {
                        "name": name + suffix,
                        "description": text,
                        "tags": ["TensorFlow Serving"],
                        "openapi_extra": body,
                        "responses": _EVENT if ending in (":predict", ":explain") else {},
                    }
                    if model or (chosen and body is None):
                        method = "GET" if body is None else "POST"
                        yield self._row(method, model + chosen, ending, documented if model else {})

    def _row(
        self, method: str, path: str, ending: str, documented: Mapping[str, Any]
    ) -> DialectRoute:
        return DialectRoute(
            method,
            f"/v1/models{path}{ending}",
            _OPERATIONS[method],
            partial(self._serve, ending),
            documented,
            _PARTS,
            re.IGNORECASE,
        )

    def route(self, method: str, path: str) -> Route | None:
        """Return the route of a request; an unknown one below ``/v1/models`` gets 400."""
        if not path[3:].lower().startswith("/models") or method not in _OPERATIONS:
            return None
        malformed = Route(_OPERATIONS[method], partial(self._serve, None, "", "", ""))
        return super().route(method, path) or malformed

    def failure(self, request: HttpRequest, error: ModelportError) -> HttpResponse:
        return HttpResponse(STATUS[code(error)], orjson.dumps({"error": str(error)}))

    async def _serve(
        self, ending: str | None, name: str, version: str, label: str, request: HttpRequest
    ) -> HttpResponse:
        """Answer a request whose path ends in ``ending``; None: it is malformed."""
        started, status = time.perf_counter_ns(), "OK"
        method = ending.removeprefix(":") if ending and ending != "/metadata" else ""
        try:
            if ending is None:
                path = request.raw_path.decode("ascii")
                raise InvalidArgument(f"Malformed request: {request.method[:16]} {path[:256]}")
            selected = _selected(name, version, label)
            if not method:
                # A client that does not take its responses waits for the next one.
                async with request.peer.memory.turn():
                    find = self._metadata if ending == "/metadata" else self._status
                    return await _coded(request, await finished(find(selected)))
            deadline = http_deadline(request.fields)
            bound = self._inference.servables.version(selected).max_bytes
            answer = partial(self._infer, method, selected, deadline)
            if cloud_events.is_event(request.fields):
                return await cloud_events.exchange(
                    name, request, self._max_input_bytes, deadline, bound, answer
                )
            body = await request_body.read(request, self._max_input_bytes, deadline, bound)
            return await answer(request, body)
        except (Exception, asyncio.CancelledError) as failure:
            status = "CANCELLED"  # nobody takes a response
            error = error_of(failure)
            status = code(error)
            raise error from failure
        finally:
            self._inference.record(name, method, "REST", status, started)

    async def _infer(
        self,
        method: str,
        selected: Selected,
        deadline: Deadline,
        request: HttpRequest,
        body: bytes,
    ) -> HttpResponse:
        call = TfServingCall(selected, deadline, request.trace, len(body))
        return await _coded(request, await self._run(method, call, body))

    # -- inference ------------------------------------------------------------------------------

    async def _run(self, method: str, call: TfServingCall, body: bytes) -> Buffer:
        if method == "predict":
            return await self._predict(call, body)
        if method == "explain":
            return await self._explain(call, body)
        work = partial(tfserving_examples_json.decode, body)
        large = len(body) > offload.INLINE_BYTES
        message, signature = await offload.run(work, call.deadline) if large else work()
        call = replace(call, selected=call.selected._replace(signature=signature))
        examples, write = _EXAMPLE_METHODS[method]
        return await self._inference.run_examples(
            call, message, examples, lambda _, found: write(found)
        )

    async def _predict(self, call: TfServingCall, body: bytes, rows: str = "predictions") -> Buffer:
        decoded, outputs = await self._inference.predict(
            call,
            lambda version: predict_json.decode(body, version),
            images=len(body) <= offload.INLINE_BYTES and encoded_inputs.in_json(body),
        )
        work = partial(predict_json.encode, outputs, decoded.by_row, rows)
        return await response_encoding.encode(work, outputs, call.deadline)

    async def _explain(self, call: TfServingCall, body: bytes) -> Buffer:
        """Run the model's explainer; KServe's clients read ``explanations``."""
        call = replace(call, selected=self._inference.servables.explainer(call.selected))
        return await self._predict(call, body, "explanations")

    # -- metadata and state ---------------------------------------------------------------------

    async def _status(self, selected: Selected) -> bytes:
        servables = self._inference.servables
        if selected == Selected(""):
            return _json(servables.listing())  # TensorFlow Serving has none
        status = await servables.status(selected)
        fields = json_format.MessageToDict(status, always_print_fields_with_no_presence=True)
        plain = selected.version is None and selected.label is None
        return _json({**fields, **(servables.kserve(selected.name) if plain else {})})

    def _metadata(self, selected: Selected) -> bytes:
        if not selected.name:
            raise InvalidArgument("Missing model name in request.")
        found = self._inference.servables.version(selected)
        signatures = json_format.MessageToDict(
            found.signature_map,
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )
        document = {
            "model_spec": {
                "name": found.name,
                "signature_name": "",
                "version": str(found.number),
            },
            "metadata": {"signature_def": signatures},
        }
        return _json(document)

    # -- documentation --------------------------------------------------------------------------

    def add_routes(self, app: FastAPI) -> None:
        @app.get("/", tags=["KServe"], dependencies=HEALTH)
        async def alive() -> Response:
            """Liveness, for KServe's v1 clients."""
            return document({"status": "alive"})


async def _coded(request: HttpRequest, body: Buffer) -> HttpResponse:
    accepted = request.fields.get(b"accept-encoding")
    return await finished(request_body.coded(HttpResponse(200, body), accepted))


def _selected(name: str, digits: str, label: str) -> Selected:
    if digits and (len(digits) > 19 or int(digits) > _MAX_VERSION):
        raise InvalidArgument(f"Failed to convert version: {digits[:64]} to numeric.")
    return Selected(name, int(digits) if digits else None, label or None)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=4, ensure_ascii=False).encode()
