"""Open Inference Protocol servers over gRPC, with raw tensors.

A protobuf message is the concatenation of its fields. So the constant part of a request is
serialised once, and tensors are sent from their place in memory. Likewise a reply's head, all but
its tensors, is looked up by its bytes, and its tensors stay where they were received.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from modelport.gateway.backends.remote.grpc_client import RemoteGrpcClient
from modelport.gateway.backends.remote.signature_negotiation import (
    Metadata,
    NegotiatedSignature,
    RemoteClient,
    RemoteResponse,
    damaged,
)
from modelport.gateway.backends.remote.triton_model import parameters, tensor_metadata
from modelport.gateway.errors import Internal, InvalidArgument, ModelportError
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, Deadline, InferRequest, Parameter
from modelport.gateway.upstream.grpc import replies
from modelport.gateway.upstream.grpc_status import meant, public
from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind
from modelport.gateway.wire import protobuf, raw_tensors, tensor_contents
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from modelport.gateway.wire.raw_tensors import Buffer


def _as_it_is(content: memoryview) -> memoryview:
    return content


_SERVICE = "/inference.GRPCInferenceService/"
_STREAM = f"{_SERVICE}ModelStreamInfer"
_FINAL = "triton_final_response"
_INFER = f"{_SERVICE}ModelInfer"
_METHODS = {
    f"{_SERVICE}{name}": getattr(pb, f"{name}Response").FromString
    for name in ("ServerReady", "ModelMetadata", "ModelConfig", "ModelReady")
} | {_INFER: _as_it_is}
_RAW = bytes((protobuf.tag(pb.ModelInferRequest, "raw_input_contents"),))
_ID = bytes((protobuf.tag(pb.ModelInferRequest, "id"),))
_REPLY_ID = protobuf.tag(pb.ModelInferResponse, "id")
_REPLY_RAW = protobuf.tag(pb.ModelInferResponse, "raw_output_contents")
#: Heads with parameters are not cached, because their values may always differ.
_REPLY_HEAD = frozenset(
    protobuf.tag(pb.ModelInferResponse, field)
    for field in ("model_name", "model_version", "outputs")
)
_MAX_INT64 = 2**63 - 1
_FIELDS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
#: Cached heads, and the size of the largest reply head to cache.
KEPT = 1024
MAX_TEMPLATE_BYTES = 2048

#: An output: name, datatype, shape, bytes.
_Announced = tuple[str, Datatype, tuple[int, ...], int]


class TritonGrpcClient(RemoteGrpcClient, RemoteClient):
    """The gRPC client: one channel per endpoint."""

    def __init__(self, route: ModelRoute, model: str, _: ModelConfig | None = None) -> None:
        super().__init__(route, _METHODS)
        self._model = model
        self._head = b""
        self._all = b""
        self._outputs: dict[str, bytes] = {}
        self._announced = lru_cache(KEPT)(self._announce)

    async def metadata(self, address: str, version: str, limit: Deadline) -> Metadata:
        message = pb.ModelMetadataRequest(name=self._model, version=version)
        reply = await self._tell(address, "ModelMetadata", message, limit)
        inputs, outputs = (
            tuple(tensor_metadata(t.name, t.datatype, t.shape) for t in tensors)
            for tensors in (reply.inputs, reply.outputs)
        )
        return Metadata(tuple(reply.versions), inputs, outputs)

    async def config(self, address: str, version: str, limit: Deadline) -> ModelConfig | None:
        message = pb.ModelConfigRequest(name=self._model, version=version)
        try:
            return (await self._tell(address, "ModelConfig", message, limit)).config
        except ModelportError:  # some servers do not implement it
            return None

    async def ready(self, address: str, version: str, limit: Deadline) -> None:
        message = pb.ModelReadyRequest(name=self._model, version=version)
        if not (await self._tell(address, "ModelReady", message, limit)).ready:
            raise EndpointFailed(FailureKind.UNREADY)

    async def loading(self, address: str, limit: Deadline) -> bool:
        reply = await self._tell(address, "ServerReady", pb.ServerReadyRequest(), limit)
        return not reply.ready

    async def _tell(self, address: str, method: str, message: Any, limit: Deadline) -> Any:
        content = message.SerializeToString()
        return await self._ask(address, _SERVICE + method, content, limit)

    async def serve(self, address: str, version: str, agreement: NegotiatedSignature) -> None:
        self._agreement = agreement
        head = pb.ModelInferRequest(model_name=self._model, model_version=version)
        self._head = head.SerializeToString()
        for name in agreement.outputs:
            output = pb.ModelInferRequest()
            output.outputs.add(name=name)
            self._outputs[name] = output.SerializeToString()
        self._all = b"".join(self._outputs.values())
        if agreement.decoupled:
            self._open_streams(_STREAM)

    async def infer(self, address: str, request: InferRequest, limit: Deadline) -> RemoteResponse:
        message = self._encode(request, limit)
        content: memoryview = await self._ask(address, _INFER, message, limit)
        answer = self._plain(content, request)
        if answer is not None:
            return answer
        try:
            reply = pb.ModelInferResponse.FromString(content)
        except DecodeError as error:
            raise EndpointFailed(FailureKind.DAMAGED, "it is not a valid message") from error
        return self._decode(reply, request)

    async def stream(
        self, address: str, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[RemoteResponse, None]:
        message = self._encode(request, deadline)
        reply = pb.ModelStreamInferResponse.FromString
        found = replies(self._streams[address], message, reply, deadline)
        async with aclosing(found) as messages:
            async for each in messages:
                if each.error_message:
                    raise _failed(public(each.error_message))
                response = each.infer_response
                final = False
                if _FINAL in response.parameters:
                    final = response.parameters[_FINAL].bool_param
                    del response.parameters[_FINAL]
                if response.outputs or not final:
                    yield replace(self._decode(response, request), final=final)

    def _encode(self, request: InferRequest, limit: Deadline) -> list[Buffer]:
        parts: list[Buffer] = [self._head]
        if request.id:
            text = request.id.encode()
            parts += (_ID, protobuf.varint(len(text)), text)
        if request.parameters:
            message = pb.ModelInferRequest()
            for key, value in parameters(request, limit.remaining()).items():
                parameter = message.parameters[key]
                field = _FIELDS[type(value)]
                if type(value) is int and (key == "priority" or value > _MAX_INT64):
                    field = "uint64_param"  # Triton reads a priority only there
                setattr(parameter, field, value)
            parts.append(message.SerializeToString())
        blobs: list[Buffer] = []
        for tensor in self._agreement.to_wire(request):
            parts.append(_input(tensor.name, tensor.datatype, tensor.data.shape))
            blob = raw_tensors.encode(tensor)
            blobs += (_RAW, protobuf.varint(len(blob)), blob)
        if request.outputs:
            parts += map(self._outputs.__getitem__, request.outputs)
        else:
            parts.append(self._all)
        parts += blobs
        return parts

    def _plain(self, content: memoryview, request: InferRequest) -> RemoteResponse | None:
        """Decode a reply with valid raw tensors only, without parsing; None: use ``_decode``."""
        split = protobuf.split(content, _REPLY_HEAD, _REPLY_ID, _REPLY_RAW, MAX_TEMPLATE_BYTES)
        if split is None:
            return None
        head, _, blobs = split
        announced = self._announced(head, self._agreement.batch_size(request))
        if not announced or len(announced) != len(blobs):
            return None
        arrays: dict[str, Array] = {}
        for (name, datatype, shape, size), blob in zip(announced, blobs, strict=True):
            if len(blob) != size:
                return None
            arrays[name] = np.ndarray(shape, NUMPY_DTYPES[datatype], blob)
        return RemoteResponse(self._agreement.ordered(arrays, len(announced), request, omits=True))

    def _announce(self, head: bytes, batch: int | None) -> tuple[_Announced, ...] | None:
        """The outputs that ``head`` announces; None: ``_decode`` must check each such reply."""
        found: list[_Announced] = []
        try:
            for item in pb.ModelInferResponse.FromString(head).outputs:
                known = self._agreement.expect(item.name, item.datatype, item.shape, batch)
                name, datatype, shape = known
                raw_tensors.parse_shape(name, shape)
                if item.HasField("contents") or datatype in (Datatype.BYTES, Datatype.BOOL):
                    return None
                size = math.prod(shape) * NUMPY_DTYPES[datatype].itemsize
                found.append((name, datatype, shape, size))
        except (DecodeError, InvalidArgument, EndpointFailed):
            return None
        return tuple(found)

    def _decode(self, message: Any, request: InferRequest) -> RemoteResponse:
        agreement = self._agreement
        batch = agreement.batch_size(request)
        blobs = message.raw_output_contents
        if not message.outputs and not message.model_name:  # an empty message
            raise EndpointFailed(FailureKind.DAMAGED, "it has neither a model name nor an output")
        if blobs and len(blobs) != len(message.outputs):
            raise EndpointFailed(FailureKind.DAMAGED, "its outputs and their contents do not match")
        arrays: dict[str, Array] = {}
        for index, item in enumerate(message.outputs):
            name, datatype, shape = agreement.expect(item.name, item.datatype, item.shape, batch)
            try:
                raw_tensors.parse_shape(name, shape)
                if blobs:
                    arrays[name] = raw_tensors.decode(name, datatype, shape, blobs[index])
                else:
                    arrays[name] = tensor_contents.decode(name, datatype, shape, item.contents)
            except InvalidArgument as error:
                raise damaged(name) from error
        outputs = agreement.ordered(arrays, len(message.outputs), request, omits=True)
        if not message.parameters:
            return RemoteResponse(outputs)
        return RemoteResponse(outputs, {key: _value(p) for key, p in message.parameters.items()})


def _failed(said: str) -> ModelportError:
    """The error of a stream message, which has no status; retryable ones are known by their
    text."""
    error = meant("UNAVAILABLE", said)
    return Internal(said) if isinstance(error, EndpointFailed) else error


@lru_cache(KEPT)
def _input(name: str, datatype: Datatype, shape: tuple[int, ...]) -> bytes:
    message = pb.ModelInferRequest()
    message.inputs.add(name=name, datatype=datatype.value, shape=shape)
    return bytes(message.SerializeToString())


def _value(parameter: Any) -> Parameter:
    value: Parameter = getattr(
        parameter, parameter.WhichOneof("parameter_choice") or "string_param"
    )
    return value
