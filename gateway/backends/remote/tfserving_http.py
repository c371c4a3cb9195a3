"""TensorFlow Serving over REST, in columnar format: ``{"inputs": {name: nested lists}}``.

Its JSON has no FP16, BF16 and UINT16 (``json_tensor.cc``) and no shapes, so only the last dimension
can be 0. FP32 is written as a double, so that every bit is preserved however the server parses
numbers; NaN and the infinities are tokens, strings are base64.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
from google.protobuf import json_format

from modelport.gateway.backends.remote.signature_negotiation import (
    NegotiatedSignature,
    RemoteResponse,
    damaged,
)
from modelport.gateway.backends.remote.tfserving_model import (
    TfServingClient,
    cause_of,
    wanted,
)
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository.autocomplete import ArtifactTensor
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.types import Array, Datatype, Deadline, InferRequest, Tensor, TensorSpec
from modelport.gateway.upstream import http
from modelport.gateway.upstream.http import HttpReply
from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind
from modelport.gateway.wire import json_tensors, json_text, raw_tensors
from modelport.gateway.wire.long_array import LongArray
from modelport.gateway.wire.proto import serving_pb2 as pb

T = TypeVar("T")

BASE64_KEY = "b64"
_HEADERS = {"Content-Type": "application/json"}
_DAMAGED_JSON = "its JSON is not a response of TensorFlow Serving"


class TfServingHttpClient(TfServingClient):
    """The REST client: one session over all endpoints."""

    unsupported = frozenset({Datatype.FP16, Datatype.BF16, Datatype.UINT16})

    def __init__(self, route: ModelRoute, model: str, config: ModelConfig | None) -> None:
        super().__init__(route, model, config)
        self._path = f"/v1/models/{quote(model, safe='')}"
        self._session = http.HttpSession(route)
        self._predict_path = ""
        self._specs: Mapping[str, TensorSpec] = {}

    def _versioned(self, version: str) -> str:
        if self.label:
            return f"{self._path}/labels/{quote(self.label, safe='')}"
        return f"{self._path}/versions/{version}" if version else self._path

    async def status(
        self, address: str, version: str, limit: Deadline
    ) -> pb.GetModelStatusResponse:
        reply = await self._session.ask("GET", address, self._versioned(version), limit)
        return _parsed(_document(reply), pb.GetModelStatusResponse())

    async def describe(
        self, address: str, version: str, limit: Deadline
    ) -> tuple[pb.ModelSpec, pb.SignatureDefMap]:
        path = f"{self._versioned(version)}/metadata"
        document = _document(await self._session.ask("GET", address, path, limit))
        metadata = document.get("metadata")
        if type(metadata) is not dict:
            raise EndpointFailed(FailureKind.DAMAGED, _DAMAGED_JSON)
        signatures = _parsed(metadata.get("signature_def"), pb.SignatureDefMap())
        return _parsed(document.get("model_spec"), pb.ModelSpec()), signatures

    async def serve(self, address: str, version: str, agreement: NegotiatedSignature) -> None:
        await super().serve(address, version, agreement)
        agreement.refuse(
            self.unsupported,
            'TensorFlow Serving\'s REST does not carry; set protocol = "grpc" in its route',
        )
        self._predict_path = f"{self._versioned(version)}:predict"
        self._specs = {spec.name: spec for spec in agreement.signature.outputs}

    async def infer(self, address: str, request: InferRequest, limit: Deadline) -> RemoteResponse:
        named = request.signature
        inputs = request.inputs if named else self.agreement.to_wire(request)
        body = _encode(named or self.signature, inputs)
        reply = await self._session.ask("POST", address, self._predict_path, limit, body, _HEADERS)
        document = _document(reply)
        return self._named(document, request) if named else self._decode(document, request)

    def _named(self, document: dict[str, Any], request: InferRequest) -> RemoteResponse:
        outputs = {}
        for name, value in _columns(document, self.signatures[request.signature].outputs).items():
            datatype = self.named_output(request, name)
            outputs[name] = Tensor(name, datatype, _decoded(name, datatype, value, _shape(value)))
        return self.named_answer(request, outputs)

    def _decode(self, document: dict[str, Any], request: InferRequest) -> RemoteResponse:
        agreement = self.agreement
        assert self.told is not None
        columns = _columns(document, self.told.outputs)
        batch = agreement.batch_size(request)
        arrays = {
            name: self._array(name, columns[name], batch)
            for name in wanted(agreement, request)
            if name in columns
        }
        return RemoteResponse(agreement.ordered(arrays, len(arrays), request))

    def _array(self, name: str, value: Any, batch: int | None) -> Array:
        spec = self._specs[name]
        dims = spec.model_dims if batch is None else (batch, *spec.model_dims)
        shape = _shape(value)
        if shape[-1:] == (0,):  # dimensions after an empty one are not visible
            shape += tuple(max(0, size) for size in dims[len(shape) :])
        self.agreement.expect(name, spec.datatype.value, shape, batch)
        return _decoded(name, spec.datatype, value, shape)

    def reset(self, address: str) -> None:
        self._session.reset(address)

    async def close(self) -> None:
        await self._session.close()


def _columns(
    document: dict[str, Any], outputs: Sequence[TensorSpec | ArtifactTensor]
) -> dict[str, Any]:
    """The columns of a response, by name; the server omits the name of a single one."""
    columns = document.get("outputs")
    if len(outputs) == 1:
        return {outputs[0].name: columns}
    if type(columns) is not dict:
        raise EndpointFailed(FailureKind.DAMAGED, _DAMAGED_JSON)
    return columns


def _encode(signature: str, inputs: list[Tensor]) -> bytes:
    finite, columns = True, {}
    for tensor in inputs:
        data = tensor.data
        if math.prod(data.shape) == 0 and 0 in data.shape[:-1]:
            raise InvalidArgument(
                f"input '{tensor.name}' of shape {list(data.shape)} cannot be sent over "
                "TensorFlow Serving's REST API: only the last dimension may be 0"
            )
        if tensor.datatype is Datatype.BYTES:
            coded: list[Any] = [
                {BASE64_KEY: base64.b64encode(item).decode()} for item in data.reshape(-1)
            ]
            columns[tensor.name] = raw_tensors.object_array(coded, data.shape).tolist()
            continue
        if data.dtype.kind == "f":
            finite = finite and bool(np.isfinite(data).all())
            data = data.astype(np.float64)
        columns[tensor.name] = data.tolist()
    document = {"signature_name": signature, "inputs": columns}
    return json_text.dumps(document) if finite else json_text.dumps_any(document)


def _decoded(name: str, datatype: Datatype, value: Any, shape: tuple[int, ...]) -> Array:
    try:
        if type(value) is LongArray and datatype is not Datatype.BYTES:
            return json_tensors.decode(name, datatype, shape, value)
        flat = _flat(value, shape)
        if datatype is Datatype.BYTES:
            return raw_tensors.object_array([_bytes(item) for item in flat], shape)
        return json_tensors.decode(name, datatype, shape, flat)
    except (InvalidArgument, ValueError) as error:
        raise damaged(name) from error


def _shape(value: Any) -> tuple[int, ...]:
    """Infer the shape from the first elements, as TensorFlow Serving does."""
    if type(value) is LongArray:
        return value.shape
    shape = []
    while type(value) is list:
        shape.append(len(value))
        if not value:
            break
        value = value[0]
    return tuple(shape)


def _flat(value: Any, shape: tuple[int, ...]) -> list[Any]:
    """The elements in order. Raises ``ValueError`` if the lists do not have ``shape``."""
    items = [value.tolist() if type(value) is LongArray else value]
    for size in shape:
        if not all(type(item) is list and len(item) == size for item in items):
            raise ValueError
        items = list(itertools.chain.from_iterable(items))
    return items


def _bytes(item: Any) -> bytes:
    """Decode a BYTES element. Raises ``ValueError`` if it is neither text nor base64."""
    if type(item) is str:
        return item.encode()
    if type(item) is dict and item.keys() == {BASE64_KEY} and type(item[BASE64_KEY]) is str:
        try:
            return base64.b64decode(item[BASE64_KEY], validate=True)
        except binascii.Error as error:
            raise ValueError from error
    raise ValueError


def _document(reply: HttpReply) -> dict[str, Any]:
    """The JSON object of a successful reply.

    Raises:
        EndpointFailed, ModelportError: by the status; or the body is not a JSON object.
    """
    document = http.read_json(reply, _DAMAGED_JSON, _error)
    if type(document) is not dict:
        raise EndpointFailed(FailureKind.DAMAGED, _DAMAGED_JSON)
    return document


def _error(status: int, document: Mapping[str, Any]) -> Exception:
    meant = http.meant(status, document.get("error"))
    return cause_of(meant) if isinstance(meant, InvalidArgument) else meant


def _parsed(document: Any, message: T) -> T:
    """Parse ``document`` into the empty ``message``."""
    if type(document) is not dict:
        raise EndpointFailed(FailureKind.DAMAGED, _DAMAGED_JSON)
    try:
        json_format.ParseDict(document, message, ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise EndpointFailed(FailureKind.DAMAGED, _DAMAGED_JSON) from error
    return message
