"""TensorFlow Serving over gRPC: PredictionService, and ModelService for the versions."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from modelport.gateway.backends.remote.grpc_client import RemoteGrpcClient
from modelport.gateway.backends.remote.signature_negotiation import (
    NegotiatedSignature,
    RemoteResponse,
    damaged,
)
from modelport.gateway.backends.remote.tfserving_model import (
    METADATA_FIELD,
    TfServingClient,
    cause_of,
    check_version,
    wanted,
)
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.types import Array, Deadline, InferRequest, Tensor
from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind
from modelport.gateway.wire import tensor_proto
from modelport.gateway.wire.proto import serving_pb2 as pb
from modelport.gateway.wire.protobuf import tag
from modelport.gateway.wire.raw_tensors import Buffer

_PREDICT = "/tensorflow.serving.PredictionService/Predict"
_METADATA = "/tensorflow.serving.PredictionService/GetModelMetadata"
_STATUS = "/tensorflow.serving.ModelService/GetModelStatus"
_METHODS = {
    _PREDICT: pb.PredictResponse.FromString,
    _METADATA: pb.GetModelMetadataResponse.FromString,
    _STATUS: pb.GetModelStatusResponse.FromString,
}

_INPUTS = tag(pb.PredictRequest, "inputs")


class TfServingGrpcClient(RemoteGrpcClient, TfServingClient):
    """The gRPC client: one channel per endpoint."""

    def __init__(self, route: ModelRoute, model: str, config: ModelConfig | None) -> None:
        RemoteGrpcClient.__init__(self, route, _METHODS)
        TfServingClient.__init__(self, route, model, config)
        self._head = b""
        self._asks_all = False

    async def _ask(
        self, address: str, path: str, message: bytes | Sequence[Buffer], limit: Deadline
    ) -> Any:
        try:
            return await super()._ask(address, path, message, limit)
        except InvalidArgument as error:
            raise cause_of(error) from error

    async def status(
        self, address: str, version: str, limit: Deadline
    ) -> pb.GetModelStatusResponse:
        message = pb.GetModelStatusRequest(model_spec=self.spec(version))
        content = message.SerializeToString()
        found: pb.GetModelStatusResponse = await self._ask(address, _STATUS, content, limit)
        return found

    async def describe(
        self, address: str, version: str, limit: Deadline
    ) -> tuple[pb.ModelSpec, pb.SignatureDefMap]:
        message = pb.GetModelMetadataRequest(
            model_spec=self.spec(version), metadata_field=[METADATA_FIELD]
        )
        reply = await self._ask(address, _METADATA, message.SerializeToString(), limit)
        signatures = pb.SignatureDefMap()
        with contextlib.suppress(DecodeError):
            if reply.metadata[METADATA_FIELD].Unpack(signatures):
                return reply.model_spec, signatures
        raise EndpointFailed(FailureKind.DAMAGED, "it holds no signatures")

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
        reply = await self._ask(address, _PREDICT, parts, limit)
        if not self.label:
            check_version(reply.model_spec, self.version)
        return self._named(reply, request) if named else self._decode(reply, request)

    def _named(self, reply: pb.PredictResponse, request: InferRequest) -> RemoteResponse:
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
