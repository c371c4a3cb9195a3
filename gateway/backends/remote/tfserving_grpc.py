"""TensorFlow Serving over gRPC: PredictionService, and ModelService for the versions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from modelport.gateway.backends.remote.signature_negotiation import (
    NegotiatedSignature,
    RemoteResponse,
)
from modelport.gateway.backends.remote.tfserving_model import (
    METADATA_FIELD,
    TfServingClient,
    cause_of,
    check_version,
    damaged,
    wanted,
)
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.types import Array, Deadline, InferRequest, Tensor
from modelport.gateway.upstream import EndpointFailed, FailureKind, grpc
from modelport.gateway.upstream.grpc import MAX_MESSAGE_BYTES, UnaryMethod
from modelport.gateway.wire import tensor_proto
from modelport.gateway.wire.proto import serving_pb2 as pb
from modelport.gateway.wire.protobuf import tag
from modelport.gateway.wire.raw_tensors import Buffer

_PREDICTION = "/tensorflow.serving.PredictionService/"
_METHODS = {
    "Predict": f"{_PREDICTION}Predict",
    "GetModelMetadata": f"{_PREDICTION}GetModelMetadata",
    "GetModelStatus": "/tensorflow.serving.ModelService/GetModelStatus",
}

_INPUTS = tag(pb.PredictRequest, "inputs")


class TfServingGrpcClient(TfServingClient):
    """The gRPC client: one channel per endpoint."""

    def __init__(self, route: ModelRoute, model: str, config: ModelConfig | None) -> None:
        super().__init__(route, model, config)
        self._channels = {address: grpc.GrpcChannel(address, route) for address in route.endpoints}
        self._calls: dict[tuple[str, str], UnaryMethod] = {
            (address, name): channel.method(method)
            for address, channel in self._channels.items()
            for name, method in _METHODS.items()
        }
        self._head = b""
        self._asks_all = False

    async def _ask(
        self,
        address: str,
        method: str,
        message: bytes | Sequence[Buffer],
        reply: Any,
        limit: Deadline,
    ) -> Any:
        try:
            return await grpc.unary(self._calls[address, method], message, reply.FromString, limit)
        except InvalidArgument as error:
            raise cause_of(error) from error

    async def status(
        self, address: str, version: str, limit: Deadline
    ) -> pb.GetModelStatusResponse:
        message = pb.GetModelStatusRequest(model_spec=self.spec(version))
        content = message.SerializeToString()
        reply = pb.GetModelStatusResponse
        found: pb.GetModelStatusResponse = await self._ask(
            address, "GetModelStatus", content, reply, limit
        )
        return found

    async def describe(
        self, address: str, version: str, limit: Deadline
    ) -> tuple[pb.ModelSpec, pb.SignatureDefMap]:
        message = pb.GetModelMetadataRequest(
            model_spec=self.spec(version), metadata_field=[METADATA_FIELD]
        )
        reply = await self._ask(
            address,
            "GetModelMetadata",
            message.SerializeToString(),
            pb.GetModelMetadataResponse,
            limit,
        )
        signatures = pb.SignatureDefMap()
        if METADATA_FIELD not in reply.metadata:
            raise EndpointFailed(FailureKind.DAMAGED, "it holds no signatures")
        try:
            packed = reply.metadata[METADATA_FIELD].Unpack(signatures)
        except DecodeError:
            packed = False
        if not packed:
            raise EndpointFailed(FailureKind.DAMAGED, "it holds no signatures")
        return reply.model_spec, signatures

    async def serve(self, address: str, version: str, agreement: NegotiatedSignature) -> None:
        await super().serve(address, version, agreement)
        spec = self.spec(version, self.signature)
        self._head = pb.PredictRequest(model_spec=spec).SerializeToString()
        told = {tensor.name for tensor in self.told.outputs} if self.told else set()
        self._asks_all = told == set(agreement.outputs)

    async def infer(self, address: str, request: InferRequest, limit: Deadline) -> RemoteResponse:
        named = request.signature
        parts: list[Buffer] = [self._head]
        if named:
            spec = self.spec(self.version, named)
            parts = [pb.PredictRequest(model_spec=spec).SerializeToString()]
            parts.append(pb.PredictRequest(output_filter=request.outputs).SerializeToString())
        elif request.outputs or not self._asks_all:
            names = pb.PredictRequest(output_filter=wanted(self.agreement, request))
            parts.append(names.SerializeToString())
        for tensor in request.inputs if named else self.agreement.to_wire(request):
            parts += tensor_proto.entry(_INPUTS, tensor)
        if sum(map(len, parts)) > MAX_MESSAGE_BYTES:
            raise InvalidArgument("the request exceeds gRPC's limit of 2 GiB")
        reply = await self._ask(address, "Predict", parts, pb.PredictResponse, limit)
        return self._named(reply, request) if named else self._decode(reply, request)

    def _named(self, reply: pb.PredictResponse, request: InferRequest) -> RemoteResponse:
        if not self.label:
            check_version(reply.model_spec, self.version)
        outputs: dict[str, Tensor] = {}
        for name in reply.outputs:
            try:
                tensor = tensor_proto.decode(name, reply.outputs[name])
            except InvalidArgument as error:
                raise damaged(name) from error
            if tensor.datatype is not self.named_output(request, name):
                raise damaged(name)
            outputs[name] = tensor
        return self.named_answer(request, outputs)

    def _decode(self, reply: pb.PredictResponse, request: InferRequest) -> RemoteResponse:
        agreement = self.agreement
        if not self.label:
            check_version(reply.model_spec, self.version)
        batch = agreement.batch_size(request)
        arrays: dict[str, Array] = {}
        for name in wanted(agreement, request):
            if name not in reply.outputs:
                continue  # reported by ``ordered``
            message = reply.outputs[name]
            datatype = tensor_proto.DATATYPES.get(message.dtype)
            sizes = [dim.size for dim in message.tensor_shape.dim]
            agreement.expect(name, datatype and datatype.value, sizes, batch)
            try:
                arrays[name] = tensor_proto.decode(name, message).data
            except InvalidArgument as error:
                raise damaged(name) from error
        return RemoteResponse(agreement.ordered(arrays, len(arrays), request))

    def reset(self, address: str) -> None:
        self._channels[address].reset()

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
