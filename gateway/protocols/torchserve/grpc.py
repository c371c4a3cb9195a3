"""TorchServe's gRPC services, with the statuses of TorchServe 0.12 (``grpcimpl/``).

An unknown model is INTERNAL for predictions, and NOT_FOUND for management.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import orjson
from google.protobuf import empty_pb2

from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import Code, InvalidArgument, ModelportError, Unavailable
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.grpc_method import Method, RefusedMessage, Serialized
from modelport.gateway.protocols.prediction.form_body import FIELDS
from modelport.gateway.protocols.prediction.predictor import PredictionCall
from modelport.gateway.protocols.torchserve import INFERENCE_SERVICE, MANAGEMENT_SERVICE, errors
from modelport.gateway.protocols.torchserve.management import MAX_PAGE, Management, Registration
from modelport.gateway.types import Deadline
from modelport.gateway.wire import incremental_protobuf
from modelport.gateway.wire.proto import torchserve_inference_pb2 as inference
from modelport.gateway.wire.proto import torchserve_management_pb2 as management
from modelport.gateway.wire.protobuf import nested, tag
from modelport.gateway.wire.raw_tensors import Buffer

_PREDICTION_STATUSES: Mapping[type[ModelportError], str] = {
    errors.ModelNotFound: "INTERNAL",
    errors.VersionNotFound: "INTERNAL",
}
_MANAGEMENT_STATUSES: Mapping[type[ModelportError], str] = {
    errors.ApiDisabled: "PERMISSION_DENIED",
    errors.Conflict: "ABORTED",
}
#: Statuses in the responses of a stream (google.rpc.Code).
_NUMBERS = {
    Code.INVALID_ARGUMENT: 3,
    Code.NOT_FOUND: 13,
    Code.ALREADY_EXISTS: 6,
    Code.UNSUPPORTED: 12,
    Code.INTERNAL: 13,
    Code.UNAVAILABLE: 14,
    Code.CANCELLED: 1,
    Code.UNKNOWN: 2,
    Code.UNAUTHENTICATED: 16,
    Code.PERMISSION_DENIED: 7,
    Code.QUOTA_EXCEEDED: 8,
}


_NAME = tag(inference.PredictionsRequest, "model_name")
_VERSION = tag(inference.PredictionsRequest, "model_version")
_PREDICTION = tag(inference.PredictionResponse, "prediction")


class TorchServeGrpc:
    """The methods of ``InferenceAPIsService`` and ``ManagementAPIsService``."""

    def __init__(self, host: DialectHost) -> None:
        self._predictor = errors.TorchServePredictor(host.service, host.manager)
        self._manager = host.manager
        self._control = host.control
        self._models = Management(host)

    def methods(self) -> dict[str, dict[str, Method]]:
        """Return the methods by service and name."""
        request, reply = inference.PredictionsRequest, inference.PredictionResponse
        once = Method(
            *(request, reply, self._predictions, Operation.INFER),
            statuses=_PREDICTION_STATUSES,
            bound=self._bound,
        )
        predictions = {
            "Ping": Method(
                empty_pb2.Empty, inference.TorchServeHealthResponse, self._ping, Operation.HEALTH
            ),
            "Predictions": once,
            "StreamPredictions": once._replace(handler=self._stream, reply_streams=True),
            "StreamPredictions2": once._replace(
                handler=self._stream2, request_streams=True, reply_streams=True
            ),
        }
        metadata, control = Operation.METADATA, Operation.CONTROL
        handlers = {
            "DescribeModel": (management.DescribeModelRequest, self._describe, metadata),
            "ListModels": (management.ListModelsRequest, self._list, metadata),
            "RegisterModel": (management.RegisterModelRequest, self._register, control),
            "ScaleWorker": (management.ScaleWorkerRequest, self._scale, control),
            "SetDefault": (management.SetDefaultRequest, self._set_default, control),
            "UnregisterModel": (management.UnregisterModelRequest, self._unregister, control),
        }
        changes = {
            name: Method(
                *(message, management.ManagementResponse, handler, operation),
                statuses=_MANAGEMENT_STATUSES,
            )
            for name, (message, handler, operation) in handlers.items()
        }
        return {INFERENCE_SERVICE: predictions, MANAGEMENT_SERVICE: changes}

    def _bound(self, content: Buffer) -> int | None:
        """Return the size limit of a message, which must begin with model and version."""
        name = (incremental_protobuf.first(content, _NAME) or b"").decode(errors="replace")
        version = (incremental_protobuf.first(content, _VERSION) or b"").decode(errors="replace")
        if not name:
            raise InvalidArgument("a large request must begin with its model_name")
        number = errors.known_version(self._manager, name, version)
        return self._predictor.max_bytes(name, number)

    # -- inference ------------------------------------------------------------------------------

    async def _ping(self, _: Any, __: Deadline) -> Any:
        health = {"status": "Healthy" if await self._control.ready() else "Unhealthy"}
        text = orjson.dumps(health, option=orjson.OPT_INDENT_2).decode()
        return inference.TorchServeHealthResponse(health=text)

    async def _predictions(self, message: Any, deadline: Deadline) -> Any:
        reply = await self._predictor(self._call(message), deadline)
        return Serialized(nested(_PREDICTION, [reply.body]))

    def _call(self, message: Any) -> PredictionCall:
        if not message.model_name:
            raise InvalidArgument("Parameter model_name is required.")
        version = errors.known_version(self._manager, message.model_name, message.model_version)
        label = errors.label_of(message.model_version)
        for name in FIELDS:
            if name in message.input:
                body = message.input[name]
                return PredictionCall(message.model_name, version, body, label=label)
        raise InvalidArgument("the map 'input' has no entry 'data' or 'body'")

    async def _stream(self, message: Any, deadline: Deadline) -> AsyncGenerator[Any, None]:
        """Send every response of a decoupled model, or the only one of an ordinary model."""
        async with aclosing(self._predictor.stream(self._call(message), deadline)) as replies:
            async for reply in replies:
                yield inference.PredictionResponse(prediction=bytes(reply.body))

    async def _stream2(
        self, messages: AsyncIterator[Any], deadline: Deadline
    ) -> AsyncIterator[Any]:
        """Respond to each request in order; an error is sent as a response."""
        async for message in self._until_closing(messages):
            async with aclosing(self._answers(message, deadline)) as answers:
                async for answer in answers:
                    if type(message) is not RefusedMessage and message.HasField("sequence_id"):
                        answer.sequence_id = message.sequence_id
                    yield answer

    async def _answers(self, message: Any, deadline: Deadline) -> AsyncGenerator[Any, None]:
        try:
            if type(message) is RefusedMessage:
                raise message.error
            async with aclosing(self._stream(message, deadline)) as answers:
                async for answer in answers:
                    yield answer
        except ModelportError as error:
            answer = inference.PredictionResponse()
            answer.status.code = _NUMBERS[error.code]
            answer.status.message = str(error)
            yield answer

    async def _until_closing(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yield ``messages`` until the server shuts down, even while the client sends none.

        Raises:
            Unavailable: The server is shutting down.
        """
        closing = asyncio.ensure_future(self._manager.closing.wait())
        following: asyncio.Future[Any] = closing
        try:
            while True:
                following = asyncio.ensure_future(anext(messages, None))
                await asyncio.wait({following, closing}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    raise Unavailable("the server is shutting down")
                message = following.result()
                if message is None:
                    return
                yield message
        finally:
            closing.cancel()
            following.cancel()

    # -- management -----------------------------------------------------------------------------

    async def _describe(self, message: Any, _: Deadline) -> Any:
        name, version = message.model_name, message.model_version
        return _document(await self._models.describe(name, version, message.customized))

    async def _list(self, message: Any, _: Deadline) -> Any:
        return _document(
            self._models.list_models(message.limit or MAX_PAGE, message.next_page_token)
        )

    async def _register(self, message: Any, _: Deadline) -> Any:
        asked = Registration(
            message.url or None,  # protobuf cannot tell an empty text, or a zero, from none
            message.model_name,
            message.runtime,
            message.initial_workers,
            message.startup_timeout or None,
            message.batch_size or None,
            message.max_batch_delay or None,
            message.handler,
            message.response_timeout or None,
        )
        return _message(await self._models.register(asked))

    async def _scale(self, message: Any, _: Deadline) -> Any:
        minimum = message.min_worker if message.min_worker > 0 else 1
        maximum = message.max_worker if message.max_worker > 0 else minimum
        text = await self._models.scale(message.model_name, message.model_version, minimum, maximum)
        return _message(text if message.synchronous else "Processing worker updates...")

    async def _set_default(self, message: Any, _: Deadline) -> Any:
        return _message(await self._models.set_default(message.model_name, message.model_version))

    async def _unregister(self, message: Any, _: Deadline) -> Any:
        return _message(await self._models.unregister(message.model_name, message.model_version))


def _document(value: Any) -> Any:
    return _message(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def _message(text: str) -> Any:
    return management.ManagementResponse(msg=text)
