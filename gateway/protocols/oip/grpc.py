"""OIP over gRPC, messages ↔ types, as a table of methods that any front can serve.

The messages are those ``tritonclient`` ships (``grpc_service.proto``). A method is an async
function from a request to a reply, or from a stream to a stream, that raises ``ModelportError``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from google.protobuf import json_format
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from gateway.dataplane import DataPlane
from gateway.errors import (
    Code,
    InvalidArgument,
    ModelportError,
    NotFound,
    Unavailable,
    Unsupported,
)
from gateway.lifecycle import Lifecycle
from gateway.protocols.grpc_method import Method
from gateway.protocols.oip import documents
from gateway.protocols.oip import parameters as oip_parameters
from gateway.types import (
    Deadline,
    InferRequest,
    InferResponse,
    Parameter,
    Tensor,
)
from gateway.wire import contents, raw

SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"
#: Requests of one stream that may be in progress; answers keep the requests' order.
STREAM_WINDOW = 64
#: How soon a health watcher learns of a change.
WATCH_SECONDS = 0.5
EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"

Unary = Callable[[Any, Deadline], Awaitable[Any]]


class OipGrpc:
    """The methods of ``inference.GRPCInferenceService`` and ``grpc.health.v1.Health``."""

    def __init__(self, dataplane: DataPlane, lifecycle: Lifecycle) -> None:
        self._dataplane = dataplane
        self._lifecycle = lifecycle

    def methods(self) -> dict[str, dict[str, Method]]:
        """service → method → row."""
        unary: dict[str, Unary] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "ModelInfer": self._model_infer,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._repository_load,
            "RepositoryModelUnload": self._repository_unload,
        }
        table = {
            name: Method(getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response"), handler)
            for name, handler in unary.items()
        }
        table["ModelStreamInfer"] = Method(
            pb.ModelInferRequest, pb.ModelStreamInferResponse, self._stream, True, True
        )
        check = Method(health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse, self._check)
        watch = Method(
            health_pb2.HealthCheckRequest,
            health_pb2.HealthCheckResponse,
            self._watch,
            reply_streams=True,
        )
        return {SERVICE: table, HEALTH_SERVICE: {"Check": check, "Watch": watch}}

    # -- infer ----------------------------------------------------------------------------------

    async def _model_infer(self, message: Any, deadline: Deadline) -> Any:
        request = decode(message)
        deadline = oip_parameters.deadline(request, deadline)
        return encode(await self._dataplane.infer(request, deadline))

    async def _stream(self, messages: AsyncIterator[Any], deadline: Deadline) -> AsyncIterator[Any]:
        """Answers in the order asked; an error goes into its answer and the stream stays open."""
        answers: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(STREAM_WINDOW)
        loop = asyncio.get_running_loop()

        async def read() -> None:
            try:
                async for message in messages:
                    await answers.put(loop.create_task(self._answer(message, deadline)))
            finally:
                await answers.put(None)

        async def end_when_closing() -> None:
            await self._lifecycle.closing.wait()
            reader.cancel()

        reader = loop.create_task(read())
        closer = loop.create_task(end_when_closing())
        try:
            while (task := await answers.get()) is not None:
                yield await task
            if self._lifecycle.closing.is_set():
                raise Unavailable("the server is shutting down")
            await reader
        finally:
            closer.cancel()
            reader.cancel()
            while not answers.empty():
                if (task := answers.get_nowait()) is not None:
                    task.cancel()

    async def _answer(self, message: Any, deadline: Deadline) -> Any:
        try:
            reply = await self._model_infer(message, deadline)
        except ModelportError as error:
            failed = pb.ModelInferResponse(id=message.id)
            return pb.ModelStreamInferResponse(error_message=str(error), infer_response=failed)
        reply.parameters["triton_final_response"].bool_param = True
        return pb.ModelStreamInferResponse(infer_response=reply)

    # -- health and metadata --------------------------------------------------------------------

    async def _server_live(self, _: Any, __: Deadline) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def _server_ready(self, _: Any, __: Deadline) -> Any:
        return pb.ServerReadyResponse(ready=self._lifecycle.ready)

    async def _model_ready(self, message: Any, _: Deadline) -> Any:
        try:
            self._lifecycle.require_ready(message.name, documents.parse_version(message.version))
        except ModelportError as error:
            if error.code is Code.INVALID_ARGUMENT:
                raise
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    async def _server_metadata(self, _: Any, __: Deadline) -> Any:
        return pb.ServerMetadataResponse(**documents.server_metadata())

    async def _model_metadata(self, message: Any, _: Deadline) -> Any:
        version = documents.parse_version(message.version)
        document = documents.model_metadata(self._lifecycle, message.name, version)
        return json_format.ParseDict(document, pb.ModelMetadataResponse())

    async def _model_config(self, message: Any, _: Deadline) -> Any:
        served = self._lifecycle.get(message.name, documents.parse_version(message.version))
        return pb.ModelConfigResponse(config=served.config)

    async def _model_statistics(self, message: Any, _: Deadline) -> Any:
        version = documents.parse_version(message.version)
        document = documents.model_statistics(self._lifecycle, message.name, version)
        return json_format.ParseDict(document, pb.ModelStatisticsResponse())

    async def _check(self, message: Any, _: Deadline) -> Any:
        return health_pb2.HealthCheckResponse(status=self._health(message.service))

    async def _watch(self, message: Any, _: Deadline) -> AsyncIterator[Any]:
        """The status now and at every change, until the server drains."""
        last = None
        while True:
            last_look = self._lifecycle.draining.is_set()  # before the status: it must be told
            try:
                status = self._health(message.service)
            except NotFound:
                status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
            if last_look:
                return
            last = status
            with suppress(TimeoutError):
                await asyncio.wait_for(self._lifecycle.draining.wait(), WATCH_SECONDS)

    def _health(self, service: str) -> Any:
        serving = health_pb2.HealthCheckResponse.SERVING
        if service in ("", SERVICE, HEALTH_SERVICE):
            return serving if self._lifecycle.ready else health_pb2.HealthCheckResponse.NOT_SERVING
        raise NotFound(f"unknown service '{service}'")

    # -- repository -----------------------------------------------------------------------------

    async def _repository_index(self, message: Any, _: Deadline) -> Any:
        _refuse_repository(message)
        rows = self._lifecycle.index(ready_only=message.ready)
        return json_format.ParseDict({"models": rows}, pb.RepositoryIndexResponse())

    async def _repository_load(self, message: Any, _: Deadline) -> Any:
        _refuse_repository(message)
        parameters = {
            key: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
            for key, value in message.parameters.items()
        }
        await self._lifecycle.load(message.model_name, documents.load_override(parameters))
        return pb.RepositoryModelLoadResponse()

    async def _repository_unload(self, message: Any, _: Deadline) -> Any:
        _refuse_repository(message)
        await self._lifecycle.unload(message.model_name)
        return pb.RepositoryModelUnloadResponse()


def _refuse_repository(message: Any) -> None:
    if message.repository_name:
        raise Unsupported("'repository_name' specification is not supported")


def decode(message: Any) -> InferRequest:
    """``ModelInferRequest`` → ``InferRequest``.

    Raises:
        InvalidArgument: naming the input that is wrong.
        Unsupported: shared memory is asked for.
    """
    blobs = message.raw_input_contents
    if blobs and len(blobs) != len(message.inputs):
        raise InvalidArgument(
            f"expected {len(message.inputs)} raw_input_contents, one for each input, but got "
            f"{len(blobs)} for model '{message.model_name}'"
        )
    tensors = []
    for index, item in enumerate(message.inputs):
        name = item.name
        datatype = raw.parse_datatype(name, item.datatype)
        shape = raw.parse_shape(name, item.shape)
        if item.parameters:
            oip_parameters.refuse_shared_memory(item.parameters)
        if blobs:
            if item.HasField("contents"):
                raise InvalidArgument(
                    "contents field must not be specified when using raw_input_contents for "
                    f"'{name}' for model '{message.model_name}'"
                )
            data = raw.decode(name, datatype, shape, blobs[index])
        else:
            data = contents.decode(name, datatype, shape, item.contents)
        tensors.append(Tensor(name, datatype, data))
    request = InferRequest(
        message.model_name,
        tensors,
        model_version=documents.parse_version(message.model_version),
        id=message.id,
    )
    if message.parameters:
        request.parameters = {key: _parameter(key, p) for key, p in message.parameters.items()}
    if message.outputs:
        _outputs(message.outputs, request)
    return request


def _parameter(key: str, parameter: Any) -> Parameter:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        raise InvalidArgument(f"parameter '{key}' has no value")
    value: Parameter = getattr(parameter, choice)
    if key != EMPTY_FINAL_RESPONSE:  # the one reserved key that clients set, on streams
        oip_parameters.check(key, value)
    return value


def _outputs(outputs: Any, request: InferRequest) -> None:
    classification = {}
    for output in outputs:
        oip_parameters.refuse_shared_memory(output.parameters)
        if "classification" in output.parameters:
            count = _parameter("classification", output.parameters["classification"])
            classification[output.name] = int(count)
    request.outputs = tuple(output.name for output in outputs)
    request.classification = classification


def encode(response: InferResponse) -> Any:
    """``InferResponse`` → ``ModelInferResponse``, with ``raw_output_contents`` only."""
    message = pb.ModelInferResponse(
        model_name=response.model_name,
        model_version=str(response.model_version),
        id=response.id,
    )
    for key, value in response.parameters.items():
        kind = {bool: "bool", int: "int64", float: "double", str: "string"}[type(value)]
        setattr(message.parameters[key], f"{kind}_param", value)
    for tensor in response.outputs:
        message.outputs.add(
            name=tensor.name, datatype=tensor.datatype.value, shape=tensor.data.shape
        )
        message.raw_output_contents.append(bytes(raw.encode(tensor)))
    return message
