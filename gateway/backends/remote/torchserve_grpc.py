"""TorchServe over gRPC: ``Predictions``; the management API describes the model.

An error of the handler has no gRPC status: it is the response of a successful call.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from modelport.gateway.backends.remote import torchserve_model
from modelport.gateway.backends.remote.grpc_client import RemoteGrpcClient
from modelport.gateway.backends.remote.signature_negotiation import (
    NegotiatedSignature,
    RemoteResponse,
)
from modelport.gateway.backends.remote.torchserve_http import TorchServeHttpClient
from modelport.gateway.backends.remote.triton_http import HEADER_LENGTH
from modelport.gateway.errors import InvalidArgument, ModelportError
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.types import Deadline, InferRequest
from modelport.gateway.upstream.grpc import MAX_MESSAGE_BYTES, replies
from modelport.gateway.upstream.grpc_status import public
from modelport.gateway.upstream.http import HttpReply
from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind, ServerError
from modelport.gateway.wire.proto import torchserve_inference_pb2 as pb
from modelport.gateway.wire.raw_tensors import Buffer

_SERVICE = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/"
_PING, _PREDICT = f"{_SERVICE}Ping", f"{_SERVICE}Predictions"
_STREAM = f"{_SERVICE}StreamPredictions"
_METHODS = {
    _PING: pb.TorchServeHealthResponse.FromString,
    _PREDICT: pb.PredictionResponse.FromString,
}
_BODY = "body"
_decoder = json.JSONDecoder()


class TorchServeGrpcClient(RemoteGrpcClient, TorchServeHttpClient):
    """The gRPC client: one channel per endpoint."""

    def __init__(self, route: ModelRoute, model: str, config: ModelConfig | None) -> None:
        RemoteGrpcClient.__init__(self, route, _METHODS)
        TorchServeHttpClient.__init__(self, route, model, config)
        self._version = ""

    async def _ask(
        self, address: str, path: str, message: bytes | Sequence[Buffer], limit: Deadline
    ) -> Any:
        try:
            return await super()._ask(address, path, message, limit)
        except ModelportError as error:
            raise torchserve_model.cause_of(error) from error

    async def exists(self, address: str, version: str, limit: Deadline) -> None:
        """Raise unless the server responds; its gRPC API cannot query a single model."""
        await self._ask(address, _PING, b"", limit)

    async def serve(self, address: str, version: str, agreement: NegotiatedSignature) -> None:
        await super().serve(address, version, agreement)
        self._version = self.spell(version)
        if agreement.decoupled:
            self._open_streams(_STREAM)

    async def infer(self, address: str, request: InferRequest, limit: Deadline) -> RemoteResponse:
        content = self._prediction_request(request, limit)
        reply = await self._ask(address, _PREDICT, content, limit)
        return self._predicted(reply, request)

    async def stream(
        self, address: str, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[RemoteResponse, None]:
        content = self._prediction_request(request, deadline)
        reply = pb.PredictionResponse.FromString
        found = replies(self._streams[address], content, reply, deadline)
        try:
            async with aclosing(found) as messages:
                async for each in messages:
                    yield self._predicted(each, request)
        except ModelportError as error:
            raise torchserve_model.cause_of(error) from error

    def _prediction_request(self, request: InferRequest, limit: Deadline) -> bytes:
        _, body = self.row(request, limit)
        message = pb.PredictionsRequest(
            model_name=self._model, model_version=self._version, input={_BODY: body}
        )
        if message.ByteSize() > MAX_MESSAGE_BYTES:
            raise InvalidArgument("the request exceeds gRPC's limit of 2 GiB")
        content: bytes = message.SerializeToString()
        return content

    def _predicted(self, reply: Any, request: InferRequest) -> RemoteResponse:
        prediction = reply.prediction
        headers = {} if self._raw else {HEADER_LENGTH: str(_json_size(prediction))}
        return self.answer(HttpReply(200, headers, prediction), request)

    def reset(self, address: str) -> None:
        RemoteGrpcClient.reset(self, address)
        TorchServeHttpClient.reset(self, address)

    async def close(self) -> None:
        await RemoteGrpcClient.close(self)
        await TorchServeHttpClient.close(self)


def _json_size(body: bytes) -> int:
    """The length of the JSON object at the start of ``body``.

    Latin-1 decodes every byte to one character, and JSON's delimiters are ASCII, so the rest cannot
    be mistaken for a part of the object.

    Raises:
        EndpointFailed: ``body`` does not start with a JSON object.
        ModelportError: the object is the handler's error.
    """
    try:
        document, size = _decoder.raw_decode(body.decode("latin-1"))
    except (ValueError, RecursionError) as error:
        raise EndpointFailed(FailureKind.DAMAGED, "it does not start with JSON") from error
    said = document.get("error") if type(document) is dict else None
    if type(said) is str:
        said = public(said)
        failed = said.startswith(torchserve_model.MODEL_FAILED)
        raise ServerError(said) if failed else InvalidArgument(said)
    return size
