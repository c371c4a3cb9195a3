"""OIP over gRPC: the methods of ``grpc_service.proto``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from google.protobuf import json_format

from modelport.gateway.access.context import enter
from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import Code, Decoupled, ModelportError, Unsupported
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.grpc_method import Method, Rows, Serialized
from modelport.gateway.protocols.oip import metadata
from modelport.gateway.protocols.oip import parameters as oip_parameters
from modelport.gateway.protocols.oip.grpc_health import HealthGrpc
from modelport.gateway.protocols.oip.grpc_request import (
    LargeMessage,
    LargeRequest,
    RawRequest,
    decode,
    model_of,
    named_model,
    plain_request,
)
from modelport.gateway.protocols.oip.grpc_response import encode, serialize
from modelport.gateway.protocols.oip.grpc_stream import FINAL_RESPONSE, StreamInfer
from modelport.gateway.protocols.oip.shared_memory import (
    NO_SHARED_MEMORY,
    CudaSharedMemory,
    SharedMemory,
    SharedTensors,
)
from modelport.gateway.runtime import offload
from modelport.gateway.telemetry.logs import LOGS
from modelport.gateway.types import Datatype, Deadline, InferRequest, InferResponse, finished
from modelport.gateway.wire import raw_tensors
from modelport.gateway.wire.proto import grpc_service_pb2 as pb

SERVICE = "inference.GRPCInferenceService"

_DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"
#: Errors of ``ModelReady`` that do not mean that the model is not ready.
_NOT_UNREADY = (Code.INVALID_ARGUMENT, Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)
Unary = Callable[[Any, Deadline], Awaitable[Any]]


class OipGrpc:
    """The methods of ``inference.GRPCInferenceService`` and ``grpc.health.v1.Health``."""

    def __init__(self, host: DialectHost) -> None:
        self._shared = host.shared
        self._service = host.service
        self._manager = host.manager
        self._control = host.control
        self._process = host.process
        self._loads_files, self._loads_code = host.loads_files, host.loads_code
        self._health = HealthGrpc(host.control, host.manager.draining, [SERVICE])

    def methods(self) -> dict[str, Rows]:
        """Return the methods by service and name."""
        unary: dict[str, tuple[Unary, Operation]] = {
            "ServerLive": (self._server_live, Operation.HEALTH),
            "ServerReady": (self._server_ready, Operation.HEALTH),
            "ModelReady": (self._model_ready, Operation.HEALTH),
            "ServerMetadata": (self._server_metadata, Operation.METADATA),
            "ModelMetadata": (self._model_metadata, Operation.METADATA),
            "ModelConfig": (self._model_config, Operation.METADATA),
            "ModelStatistics": (self._model_statistics, Operation.STATISTICS),
            "RepositoryIndex": (self._repository_index, Operation.METADATA),
            "RepositoryModelLoad": (self._repository_load, Operation.CONTROL),
            "RepositoryModelUnload": (self._repository_unload, Operation.CONTROL),
            "TraceSetting": (self._trace_setting, Operation.METADATA),
            "LogSettings": (self._log_settings, Operation.METADATA),
        }
        handlers = _shared_memory("System", self._shared)
        handlers |= _shared_memory("Cuda", CudaSharedMemory(self._shared))
        unary |= {name: (each, Operation.SHARED_MEMORY) for name, each in handlers.items()}
        table = {
            name: Method(getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response"), *declared)
            for name, declared in unary.items()
        }
        table["ModelInfer"] = Method(
            *(RawRequest, pb.ModelInferResponse, self._raw_infer, Operation.INFER),
            refuses=self._refuses_infer,
            bound=self._bound_infer,
            glance=plain_request,
        )
        table["ModelStreamInfer"] = Method(
            LargeRequest,
            pb.ModelStreamInferResponse,
            StreamInfer(self._manager, self._model_infer, self._responses),
            Operation.INFER,
            True,
            True,
            bound=self._bound_infer,
        )
        if self._loads_files:
            loading = table["RepositoryModelLoad"]
            table["RepositoryModelLoad"] = loading._replace(bound=lambda _: None)
        for name in ("ServerLive", "ServerReady"):
            table[name] = table[name]._replace(health=True)
        return {SERVICE: table, **self._health.methods()}

    # -- infer ----------------------------------------------------------------------------------

    async def _model_infer(self, message: Any, deadline: Deadline) -> Any:
        response, shared = await self._answer(message, deadline)
        return encode(response, shared)

    def _bound_infer(self, content: bytes | memoryview) -> int | None:
        return self._manager.get(*named_model(content)).validator.max_bytes

    def _refuses_infer(self, content: bytes | memoryview) -> bool:
        name, number = model_of(content)
        return self._service.refuses(name, number)

    def _raw_infer(self, message: Any, deadline: Deadline) -> Serialized | Awaitable[Serialized]:
        if type(message) is LargeMessage:
            return self._serialized(self._answer(message, deadline), deadline)
        answer, shared = self._infer(message, deadline)
        if isinstance(answer, InferResponse) and not _is_large(answer):
            return serialize(answer, shared)
        return self._serialized(_with(answer, shared), deadline)

    async def _serialized(
        self, answer: Awaitable[tuple[InferResponse, SharedTensors]], deadline: Deadline
    ) -> Serialized:
        response, shared = await answer
        if _is_large(response):
            return await offload.run(partial(serialize, response, shared), deadline)
        return serialize(response, shared)

    async def _answer(
        self, message: Any, deadline: Deadline
    ) -> tuple[InferResponse, SharedTensors]:
        if type(message) is LargeMessage:
            request = await self._decode(message, shared := self._shared.transfer(), deadline)
            message, deadline = request, oip_parameters.deadline(request, deadline)
            return await finished(self._single(message, deadline)), shared
        return await _with(*self._infer(message, deadline))

    def _infer(
        self, message: Any, deadline: Deadline
    ) -> tuple[InferResponse | Awaitable[InferResponse], SharedTensors]:
        """Begin a request that is decoded, or small."""
        shared = NO_SHARED_MEMORY
        if type(message) is not InferRequest:
            message = decode(message, shared := self._shared.transfer())
            deadline = oip_parameters.deadline(message, deadline)
        return self._single(message, deadline), shared

    def _single(
        self, request: InferRequest, deadline: Deadline
    ) -> InferResponse | Awaitable[InferResponse]:
        try:
            return self._service.infer(request, deadline)
        except Decoupled as error:
            raise Unsupported(_DECOUPLED) from error

    async def _decode(
        self, message: Any, shared: SharedTensors, deadline: Deadline
    ) -> InferRequest:
        if type(message) is LargeMessage:
            return await offload.run(partial(decode, message, shared), deadline)
        return decode(message, shared)

    async def _responses(self, message: Any, deadline: Deadline) -> AsyncGenerator[Any, None]:
        request = await self._decode(message, shared := self._shared.transfer(), deadline)
        deadline = oip_parameters.deadline(request, deadline)
        async with aclosing(self._service.stream(request, deadline)) as responses:
            async for response in responses:
                reply = encode(response, shared)
                if response.final:
                    reply.parameters[FINAL_RESPONSE].bool_param = True
                yield reply

    # -- health and metadata --------------------------------------------------------------------

    async def _server_live(self, _: Any, __: Deadline) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def _server_ready(self, _: Any, __: Deadline) -> Any:
        return pb.ServerReadyResponse(ready=await self._control.ready())

    async def _model_ready(self, message: Any, _: Deadline) -> Any:
        try:
            version = metadata.parse_version(message.version)
            await self._control.require_ready(message.name, version)
        except ModelportError as error:
            if error.code in _NOT_UNREADY:
                raise
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    async def _server_metadata(self, _: Any, __: Deadline) -> Any:
        return pb.ServerMetadataResponse(**metadata.server_metadata(self._shared.regions.allowed))

    async def _model_metadata(self, message: Any, _: Deadline) -> Any:
        version = metadata.parse_version(message.version)
        document = metadata.model_metadata(self._manager, message.name, version)
        return json_format.ParseDict(document, pb.ModelMetadataResponse())

    async def _model_config(self, message: Any, _: Deadline) -> Any:
        served = self._manager.get(message.name, metadata.parse_version(message.version))
        return pb.ModelConfigResponse(config=served.config)

    async def _model_statistics(self, message: Any, _: Deadline) -> Any:
        version = metadata.parse_version(message.version)
        document = await metadata.model_statistics(
            self._manager, self._control, message.name, version
        )
        return json_format.ParseDict(document, pb.ModelStatisticsResponse())

    # -- repository -----------------------------------------------------------------------------

    async def _repository_index(self, message: Any, _: Deadline) -> Any:
        _refuse_repository(message)
        rows = await self._control.index(message.ready)
        return json_format.ParseDict({"models": rows}, pb.RepositoryIndexResponse())

    async def _repository_load(self, message: Any, _: Deadline) -> Any:
        _refuse_repository(message)
        name = message.model_name
        given = metadata.load_request(name, _chosen(message.parameters))
        files = given.model_files(self._loads_code)
        await self._control.load(name, given.config, files=files)
        return pb.RepositoryModelLoadResponse()

    async def _repository_unload(self, message: Any, _: Deadline) -> Any:
        _refuse_repository(message)
        await metadata.unload(self._control, message.model_name, _chosen(message.parameters))
        return pb.RepositoryModelUnloadResponse()

    # -- settings -------------------------------------------------------------------------------

    async def _trace_setting(self, message: Any, _: Deadline) -> Any:
        if message.settings:
            changes = {name: list(each.value) or None for name, each in message.settings.items()}
            enter(Operation.CONTROL)
            settings = await self._process.trace(message.model_name, changes)
        else:
            settings = self._process.traces(message.model_name)
        reply = pb.TraceSettingResponse()
        for name, value in settings.items():
            reply.settings[name].value.extend([value] if isinstance(value, str) else value)
        return reply

    async def _log_settings(self, message: Any, _: Deadline) -> Any:
        changes = _chosen(message.settings)
        if changes:
            enter(Operation.CONTROL)
            await self._process.log(changes)
        reply = pb.LogSettingsResponse()
        for name, value in LOGS.document().items():
            kind = {bool: "bool_param", int: "uint32_param"}.get(type(value), "string_param")
            setattr(reply.settings[name], kind, value)
        return reply


async def _with(
    answer: InferResponse | Awaitable[InferResponse], shared: SharedTensors
) -> tuple[InferResponse, SharedTensors]:
    try:
        return answer if isinstance(answer, InferResponse) else await answer, shared
    except Decoupled as error:
        raise Unsupported(_DECOUPLED) from error


def _is_large(response: InferResponse) -> bool:
    """Whether to serialize takes more than a millisecond."""
    for tensor in response.outputs:  # a loop is faster than ``any``, for every response
        if tensor.data.size > raw_tensors.PIECE and tensor.datatype is Datatype.BYTES:
            return True
    return False


def _shared_memory(kind: str, memory: SharedMemory | CudaSharedMemory) -> dict[str, Unary]:
    """Return the handlers for one kind of shared memory, by method."""
    methods = f"{kind}SharedMemory"

    async def status(message: Any, _: Deadline) -> Any:
        reply = getattr(pb, f"{methods}StatusResponse")()
        for row in memory.status(message.name):
            region = reply.regions[row["name"]]
            region.MergeFrom(type(region)(**row))
        return reply

    async def register(message: Any, _: Deadline) -> Any:
        memory.require_allowed()
        await memory.register(message.name, message.key, message.offset, message.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def unregister(message: Any, _: Deadline) -> Any:
        await memory.unregister(message.name)
        return getattr(pb, f"{methods}UnregisterResponse")()

    return {
        f"{methods}Status": status,
        f"{methods}Register": register,
        f"{methods}Unregister": unregister,
    }


def _chosen(parameters: Any) -> dict[str, Any]:
    return {
        key: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
        for key, value in parameters.items()
    }


def _refuse_repository(message: Any) -> None:
    if message.repository_name:
        raise Unsupported("'repository_name' specification is not supported")
