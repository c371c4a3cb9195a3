"""Open Inference Protocol servers over HTTP: raw tensors if the server accepts them, else JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import numpy as np
from google.protobuf import json_format

from modelport.gateway.backends.remote.signature_negotiation import (
    Metadata,
    NegotiatedSignature,
    RemoteClient,
    RemoteResponse,
    damaged,
)
from modelport.gateway.backends.remote.triton_model import parameters, tensor_metadata
from modelport.gateway.errors import InvalidArgument, ModelportError
from modelport.gateway.repository.autocomplete import ArtifactTensor
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.types import Array, Deadline, InferRequest, Tensor
from modelport.gateway.upstream import http
from modelport.gateway.upstream.http import HttpReply
from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind
from modelport.gateway.wire import json_tensors, json_text, raw_tensors
from modelport.gateway.wire.proto import model_config_pb2 as pb
from modelport.gateway.wire.raw_tensors import Buffer

BINARY_EXTENSION = "binary_tensor_data"
HEADER_LENGTH = "Inference-Header-Content-Length"
_JSON = {"Content-Type": "application/json"}
#: Statuses of a server that is not ready: Triton's, and that of others.
_NOT_READY = (400, 503)
_DAMAGED_JSON = "its JSON violates the protocol"


class TritonHttpClient(RemoteClient):
    """The HTTP client: one session over all endpoints."""

    def __init__(self, route: ModelRoute, model: str, _: ModelConfig | None = None) -> None:
        self._route = route
        self._path = f"/v2/models/{quote(model, safe='')}"
        self._session = http.HttpSession(route)
        self._infer_path = ""
        self._binary = True

    def _versioned(self, version: str) -> str:
        return f"{self._path}/versions/{quote(version, safe='')}" if version else self._path

    async def _get(self, address: str, path: str, limit: Deadline) -> Any:
        return _document(await self._session.ask("GET", address, path, limit))

    async def metadata(self, address: str, version: str, limit: Deadline) -> Metadata:
        document = await self._get(address, self._versioned(version), limit)
        versions = document.get("versions") or []
        if type(versions) is not list or not all(type(word) is str for word in versions):
            raise EndpointFailed(FailureKind.DAMAGED, _DAMAGED_JSON)
        inputs, outputs = (_tensors(document.get(side) or []) for side in ("inputs", "outputs"))
        return Metadata(tuple(versions), inputs, outputs)

    async def config(self, address: str, version: str, limit: Deadline) -> ModelConfig | None:
        try:
            document = await self._get(address, f"{self._versioned(version)}/config", limit)
            return json_format.ParseDict(document, pb.ModelConfig(), ignore_unknown_fields=True)
        except EndpointFailed as error:
            if error.failure is not FailureKind.MISSING:
                raise
        except (ModelportError, json_format.ParseError):
            pass
        return None  # some servers do not implement it

    async def ready(self, address: str, version: str, limit: Deadline) -> None:
        reply = await self._session.ask("GET", address, f"{self._versioned(version)}/ready", limit)
        if reply.status != 200:
            raise EndpointFailed(FailureKind.UNREADY)

    async def loading(self, address: str, limit: Deadline) -> bool:
        reply = await self._session.ask("GET", address, "/v2/health/ready", limit)
        return reply.status in _NOT_READY

    async def serve(self, address: str, version: str, agreement: NegotiatedSignature) -> None:
        self._agreement = agreement
        self._infer_path = f"{self._versioned(version)}/infer"
        limit = Deadline.after(self._route.timeout_seconds)
        extensions = (await self._get(address, "/v2", limit)).get("extensions")
        self._binary = type(extensions) is list and BINARY_EXTENSION in extensions
        if not self._binary:
            agreement.refuse(
                json_tensors.BINARY_ONLY,
                'the server does not accept over HTTP; set protocol = "grpc" in its route',
            )

    async def infer(self, address: str, request: InferRequest, limit: Deadline) -> RemoteResponse:
        header, blobs = self._encode(request, limit)
        headers = {**_JSON, HEADER_LENGTH: str(len(header))} if self._binary else _JSON
        if blobs:
            headers["Content-Type"] = "application/octet-stream"
        body = b"".join((header, *blobs))
        reply = await self._session.ask("POST", address, self._infer_path, limit, body, headers)
        return self._decode(reply, request)

    def _encode(self, request: InferRequest, limit: Deadline) -> tuple[bytes, list[Buffer]]:
        inputs, blobs = [], []
        finite = True
        for tensor in self._agreement.to_wire(request):
            entry: dict[str, Any] = {
                "name": tensor.name,
                "shape": tensor.data.shape,
                "datatype": tensor.datatype.value,
            }
            if self._binary:
                blob = raw_tensors.encode(tensor)
                entry["parameters"] = {"binary_data_size": len(blob)}
                blobs.append(blob)
            else:
                data = _json_data(tensor)
                finite = finite and (data.dtype.kind != "f" or bool(np.isfinite(data).all()))
                entry["data"] = data.tolist()
            inputs.append(entry)
        document: dict[str, Any] = {"id": request.id} if request.id else {}
        sent = parameters(request, limit.remaining())
        if sent:
            document["parameters"] = sent
        document["inputs"] = inputs
        form = {"parameters": {"binary_data": True}} if self._binary else {}
        wanted = request.outputs or self._agreement.outputs
        document["outputs"] = [{"name": name, **form} for name in wanted]
        return json_text.dumps(document) if finite else json_text.dumps_any(document), blobs

    def _decode(self, reply: HttpReply, request: InferRequest) -> RemoteResponse:
        length = _header_length(reply)
        document = _document(reply, length)
        outputs = document.get("outputs")
        if type(outputs) is not list or not (outputs or document.get("model_name")):
            raise EndpointFailed(FailureKind.DAMAGED, _DAMAGED_JSON)
        batch = self._agreement.batch_size(request)
        view, offset = memoryview(reply.body), length
        arrays: dict[str, Array] = {}
        for item in outputs:
            if type(item) is not dict or type(item.get("shape")) is not list:
                raise EndpointFailed(FailureKind.DAMAGED, _DAMAGED_JSON)
            name, datatype, sizes = self._agreement.expect(
                item.get("name"), item.get("datatype"), item["shape"], batch
            )
            size = _parameters(item).get("binary_data_size")
            try:
                raw_tensors.parse_shape(name, sizes)
                if type(size) is int and 0 <= size <= len(view) - offset:
                    blob = view[offset : offset + size]
                    arrays[name] = raw_tensors.decode(name, datatype, sizes, blob)
                    offset += size
                else:
                    arrays[name] = json_tensors.decode(name, datatype, sizes, item.get("data"))
            except InvalidArgument as error:
                raise damaged(name) from error
        if offset != len(view):
            raise EndpointFailed(FailureKind.DAMAGED, "extra bytes follow its outputs")
        tensors = self._agreement.ordered(arrays, len(outputs), request, omits=True)
        return RemoteResponse(tensors, _parameters(document))

    def reset(self, address: str) -> None:
        self._session.reset(address)

    async def close(self) -> None:
        await self._session.close()


def _document(reply: HttpReply, length: int | None = None) -> dict[str, Any]:
    """The JSON object in the first ``length`` bytes of a successful reply.

    Raises:
        EndpointFailed, ModelportError: by the status; or the body is not a JSON object.
    """
    document = http.read_json(reply, _DAMAGED_JSON, _error, length)
    if type(document) is not dict:
        raise EndpointFailed(FailureKind.DAMAGED, _DAMAGED_JSON)
    return document


def _error(status: int, document: Mapping[str, Any]) -> Exception:
    error = http.meant(status, said := document.get("error"))
    if isinstance(error, InvalidArgument) and "unknown model" in str(said):
        return EndpointFailed(FailureKind.MISSING, str(error))
    return error


def _header_length(reply: HttpReply) -> int:
    stated = reply.headers.get(HEADER_LENGTH)
    if stated is None:
        return len(reply.body)
    if not (stated.isascii() and stated.isdigit() and len(stated) < 20):
        raise EndpointFailed(FailureKind.DAMAGED, "the length of its JSON is not a number")
    if int(stated) > len(reply.body):
        raise EndpointFailed(FailureKind.DAMAGED, "it is shorter than its JSON")
    return int(stated)


def _tensors(items: Any) -> tuple[ArtifactTensor, ...]:
    if type(items) is not list or not all(
        type(item) is dict and type(item.get("shape")) is list for item in items
    ):
        raise EndpointFailed(FailureKind.DAMAGED, _DAMAGED_JSON)
    return tuple(
        tensor_metadata(item.get("name"), item.get("datatype"), item["shape"]) for item in items
    )


def _parameters(document: dict[str, Any]) -> dict[str, Any]:
    found = document.get("parameters")
    if type(found) is not dict:
        return {}
    return {key: v for key, v in found.items() if type(v) in (bool, int, float, str)}


def _json_data(tensor: Tensor) -> Array:
    try:
        return json_tensors.encode(tensor)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"input '{tensor.name}' holds bytes that are not UTF-8, and the server that runs the "
            "model takes text only"
        ) from error
