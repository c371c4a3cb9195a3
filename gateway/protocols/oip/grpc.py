"""OIP over gRPC, messages ↔ types, as a table of methods that any front can serve.

The messages are those ``tritonclient`` ships (``grpc_service.proto``). A method is an async
function from a request to a reply, or from a stream to a stream, that raises ``ModelportError``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from google.protobuf import json_format
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from gateway.control import Control
from gateway.dataplane import DataPlane
from gateway.errors import (
    Code,
    Decoupled,
    InvalidArgument,
    ModelportError,
    NotFound,
    Unsupported,
)
from gateway.lifecycle import Lifecycle
from gateway.protocols.grpc_method import Method
from gateway.protocols.oip import documents
from gateway.protocols.oip import parameters as oip_parameters
from gateway.protocols.oip.grpc_reply import RawReply
from gateway.protocols.oip.grpc_stream import EMPTY_FINAL_RESPONSE, StreamInfer
from gateway.protocols.oip.regions_grpc import RegionsGrpc
from gateway.protocols.oip.shared_memory import REFUSED, REGION, Exchange, SharedMemory
from gateway.types import (
    Array,
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    Parameter,
    Tensor,
)
from gateway.wire import contents, raw

SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"
#: How soon a health watcher learns of a change.
WATCH_SECONDS = 0.5

Unary = Callable[[Any, Deadline], Awaitable[Any]]


class OipGrpc:
    """The methods of ``inference.GRPCInferenceService`` and ``grpc.health.v1.Health``."""

    def __init__(
        self,
        dataplane: DataPlane,
        lifecycle: Lifecycle,
        control: Control,
        shared: SharedMemory,
    ) -> None:
        self._shared = shared
        self._dataplane = dataplane
        self._lifecycle = lifecycle
        self._control = control

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
        } | RegionsGrpc(self._shared).methods()
        table["ModelInfer"] = Method(pb.ModelInferRequest, RawReply, self._raw_infer)
        table["ModelStreamInfer"] = Method(
            pb.ModelInferRequest,
            pb.ModelStreamInferResponse,
            StreamInfer(self._lifecycle, self._model_infer, self._responses),
            True,
            True,
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
        response, shared = await self._answer(message, deadline)
        return encode(response, shared)

    async def _raw_infer(self, message: Any, deadline: Deadline) -> RawReply:
        response, shared = await self._answer(message, deadline)
        return RawReply(*parts(response, shared))

    async def _answer(self, message: Any, deadline: Deadline) -> tuple[InferResponse, Exchange]:
        request = decode(message, shared := self._shared.exchange())
        deadline = oip_parameters.deadline(request, deadline)
        try:
            response = await self._dataplane.infer(request, deadline)
        except Decoupled as error:
            raise Unsupported(
                "ModelInfer RPC doesn't support models with decoupled transaction policy"
            ) from error
        return response, shared

    async def _responses(self, message: Any, deadline: Deadline) -> AsyncGenerator[Any, None]:
        request = decode(message, shared := self._shared.exchange())
        deadline = oip_parameters.deadline(request, deadline)
        async with aclosing(self._dataplane.stream(request, deadline)) as responses:
            async for response in responses:
                yield encode(response, shared)

    # -- health and metadata --------------------------------------------------------------------

    async def _server_live(self, _: Any, __: Deadline) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def _server_ready(self, _: Any, __: Deadline) -> Any:
        return pb.ServerReadyResponse(ready=await self._control.ready())

    async def _model_ready(self, message: Any, _: Deadline) -> Any:
        try:
            version = documents.parse_version(message.version)
            await self._control.require_ready(message.name, version)
        except ModelportError as error:
            if error.code is Code.INVALID_ARGUMENT:
                raise
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    async def _server_metadata(self, _: Any, __: Deadline) -> Any:
        return pb.ServerMetadataResponse(**documents.server_metadata(self._shared.allowed))

    async def _model_metadata(self, message: Any, _: Deadline) -> Any:
        version = documents.parse_version(message.version)
        document = documents.model_metadata(self._lifecycle, message.name, version)
        return json_format.ParseDict(document, pb.ModelMetadataResponse())

    async def _model_config(self, message: Any, _: Deadline) -> Any:
        served = self._lifecycle.get(message.name, documents.parse_version(message.version))
        return pb.ModelConfigResponse(config=served.config)

    async def _model_statistics(self, message: Any, _: Deadline) -> Any:
        version = documents.parse_version(message.version)
        document = await documents.model_statistics(
            self._lifecycle, self._control, message.name, version
        )
        return json_format.ParseDict(document, pb.ModelStatisticsResponse())

    async def _check(self, message: Any, _: Deadline) -> Any:
        return health_pb2.HealthCheckResponse(status=await self._health(message.service))

    async def _watch(self, message: Any, _: Deadline) -> AsyncIterator[Any]:
        """The status now and at every change, until the server drains."""
        last = None
        while True:
            last_look = self._lifecycle.draining.is_set()  # before the status: it must be told
            try:
                status = await self._health(message.service)
            except NotFound:
                status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
            if last_look:
                return
            last = status
            with suppress(TimeoutError):
                await asyncio.wait_for(self._lifecycle.draining.wait(), WATCH_SECONDS)

    async def _health(self, service: str) -> Any:
        serving = health_pb2.HealthCheckResponse.SERVING
        if service in ("", SERVICE, HEALTH_SERVICE):
            ready = await self._control.ready()
            return serving if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        raise NotFound(f"unknown service '{service}'")

    # -- repository -----------------------------------------------------------------------------

    async def _repository_index(self, message: Any, _: Deadline) -> Any:
        _refuse_repository(message)
        rows = await self._control.index(message.ready)
        return json_format.ParseDict({"models": rows}, pb.RepositoryIndexResponse())

    async def _repository_load(self, message: Any, _: Deadline) -> Any:
        _refuse_repository(message)
        parameters = {
            key: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
            for key, value in message.parameters.items()
        }
        await self._control.load(message.model_name, documents.load_override(parameters))
        return pb.RepositoryModelLoadResponse()

    async def _repository_unload(self, message: Any, _: Deadline) -> Any:
        _refuse_repository(message)
        await self._control.unload(message.model_name)
        return pb.RepositoryModelUnloadResponse()


def _refuse_repository(message: Any) -> None:
    if message.repository_name:
        raise Unsupported("'repository_name' specification is not supported")


def decode(message: Any, shared: Exchange = REFUSED) -> InferRequest:
    """``ModelInferRequest`` → ``InferRequest``.

    Raises:
        InvalidArgument: naming the input that is wrong.
        Unsupported: shared memory is asked for and not allowed.
    """
    blobs = message.raw_input_contents
    if blobs and len(blobs) != len(message.inputs):
        _check_count(message)
    tensors, index = [], 0
    for item in message.inputs:
        name = item.name
        datatype = raw.parse_datatype(name, item.datatype)
        shape = raw.parse_shape(name, item.shape)
        if item.parameters and REGION in item.parameters:
            data = _shared_input(item, datatype, shape, shared)
        elif blobs:
            if item.HasField("contents"):
                raise InvalidArgument(
                    "contents field must not be specified when using raw_input_contents for "
                    f"'{name}' for model '{message.model_name}'"
                )
            data = raw.decode(name, datatype, shape, blobs[index])
            index += 1
        else:
            data = contents.decode(name, datatype, shape, item.contents)
        tensors.append(Tensor(name, datatype, data))
    if index != len(blobs):
        _check_count(message)
    request = InferRequest(
        message.model_name,
        tensors,
        model_version=documents.parse_version(message.model_version),
        id=message.id,
    )
    if message.parameters:
        request.parameters = {key: _parameter(key, p) for key, p in message.parameters.items()}
    if message.outputs:
        _outputs(message.outputs, request, shared)
    return request


def _check_count(message: Any) -> None:
    """Raw contents are of those inputs, in order, that are not in shared memory."""
    expected = sum(REGION not in item.parameters for item in message.inputs)
    if len(message.raw_input_contents) != expected:
        raise InvalidArgument(
            f"expected {expected} raw_input_contents, one for each input, but got "
            f"{len(message.raw_input_contents)} for model '{message.model_name}'"
        )


def _shared_input(item: Any, datatype: Datatype, shape: tuple[int, ...], shared: Exchange) -> Array:
    if item.HasField("contents"):
        raise InvalidArgument(
            f"contents field must not be specified when using shared memory for '{item.name}'"
        )
    parameters = {key: _parameter(key, p) for key, p in item.parameters.items()}
    return shared.read(item.name, datatype, shape, parameters)


def _parameter(key: str, parameter: Any) -> Parameter:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        raise InvalidArgument(f"parameter '{key}' has no value")
    value: Parameter = getattr(parameter, choice)
    if key != EMPTY_FINAL_RESPONSE:  # the one reserved key that clients set, on streams
        oip_parameters.check(key, value)
    return value


def _outputs(outputs: Any, request: InferRequest, shared: Exchange) -> None:
    classification = {}
    for output in outputs:
        if REGION in output.parameters:
            parameters = {key: _parameter(key, p) for key, p in output.parameters.items()}
            shared.expect(output.name, parameters)
        if "classification" in output.parameters:
            count = _parameter("classification", output.parameters["classification"])
            classification[output.name] = int(count)
    request.outputs = tuple(output.name for output in outputs)
    request.classification = classification


def encode(response: InferResponse, shared: Exchange = REFUSED) -> Any:
    """``InferResponse`` → ``ModelInferResponse``, with ``raw_output_contents`` only."""
    message, blobs = parts(response, shared)
    message.raw_output_contents.extend(map(bytes, blobs))
    return message


def parts(response: InferResponse, shared: Exchange = REFUSED) -> tuple[Any, list[raw.Buffer]]:
    """A ``ModelInferResponse`` without its ``raw_output_contents``, and those.

    Clients look those up by an output's position: one in shared memory has an empty one.
    """
    message = pb.ModelInferResponse(
        model_name=response.model_name,
        model_version=str(response.model_version),
        id=response.id,
    )
    for key, value in response.parameters.items():
        kind = {bool: "bool", int: "int64", float: "double", str: "string"}[type(value)]
        setattr(message.parameters[key], f"{kind}_param", value)
    blobs: list[raw.Buffer] = []
    for tensor in response.outputs:
        message.outputs.add(
            name=tensor.name, datatype=tensor.datatype.value, shape=tensor.data.shape
        )
        is_shared = shared.places and shared.write(tensor)
        blobs.append(b"" if is_shared else raw.encode(tensor))
    return message, blobs
