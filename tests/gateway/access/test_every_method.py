"""Every gRPC method, for every kind of caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import numpy as np
import pytest
from google.protobuf import empty_pb2

from modelport.gateway.access.operations import Operation
from modelport.gateway.models.model import VersionState
from modelport.gateway.protocols.grpc_method import Method
from modelport.gateway.protocols.grpc_reflection import SERVICES as REFLECTION
from modelport.gateway.protocols.oip.grpc import SERVICE as OIP
from modelport.gateway.protocols.oip.grpc_health import SERVICE as HEALTH
from modelport.gateway.protocols.tfserving import MODEL_SERVICE, PREDICTION_SERVICE
from modelport.gateway.protocols.torchserve import INFERENCE_SERVICE, MANAGEMENT_SERVICE
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from modelport.gateway.wire.proto import health_pb2, reflection_pb2, serving_pb2
from modelport.gateway.wire.proto import torchserve_inference_pb2 as inference
from modelport.gateway.wire.proto import torchserve_management_pb2 as management
from tests.gateway.access.gateway import AccessGateway, channel, serving
from tests.gateway.access.test_every_route import CALLERS, MINE, RULES, UNKNOWN

OK, DENIED = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
INTERNAL, UNIMPLEMENTED = grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED
Make = Callable[[str], Any]


class MethodCall(NamedTuple):
    """A call: the status for a caller that may do everything, and its message.

    ``other`` is the status for a caller that may do everything with another model, if the message
    names no model and that differs.
    """

    right: grpc.StatusCode
    message: Make
    other: grpc.StatusCode | None = None


def _infer(model: str) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model)
    message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    message.raw_input_contents.append(np.ones(4, np.float32).tobytes())
    return message


def _predict(model: str) -> serving_pb2.PredictRequest:
    message = serving_pb2.PredictRequest()
    message.model_spec.name = model
    tensor = message.inputs["x"]
    tensor.dtype = 1
    tensor.tensor_shape.dim.add(size=1)
    tensor.tensor_shape.dim.add(size=4)
    tensor.float_val.extend([1.0] * 4)
    return message


def _of_spec(kind: Any) -> Make:
    return lambda model: kind(model_spec=serving_pb2.ModelSpec(name=model))


def _metadata(model: str) -> Any:
    message = serving_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    message.model_spec.name = model
    return message


def _multi(model: str) -> Any:
    message = serving_pb2.MultiInferenceRequest()
    task = message.tasks.add(method_name="tensorflow/serving/regress")
    task.model_spec.name = model
    return message


def _reload(_: str) -> Any:
    message = serving_pb2.ReloadConfigRequest()
    for name in ("mine", "yours"):
        message.config.model_config_list.config.add(name=name, model_platform="tensorflow")
    return message


def _prediction(model: str) -> Any:
    body = b'{"instances": [[1.0, 2.0, 3.0, 4.0]]}'
    return inference.PredictionsRequest(model_name=model, input={"data": body})


def _silent(_: str) -> Any:
    message = pb.LogSettingsRequest()
    message.settings["log_verbose_level"].uint32_param = 0
    return message


def _named(kind: Any, **fields: Any) -> Make:
    return lambda model: kind(name=model, **fields)


def _model_named(kind: Any, **fields: Any) -> Make:
    return lambda model: kind(model_name=model, **fields)


def _plain(kind: Any, **fields: Any) -> Make:
    return lambda _: kind(**fields)


CALLS: dict[str, MethodCall] = {
    f"{OIP}/ServerLive": MethodCall(OK, _plain(pb.ServerLiveRequest)),
    f"{OIP}/ServerReady": MethodCall(OK, _plain(pb.ServerReadyRequest)),
    f"{OIP}/ModelReady": MethodCall(OK, _named(pb.ModelReadyRequest)),
    f"{OIP}/ServerMetadata": MethodCall(OK, _plain(pb.ServerMetadataRequest)),
    f"{OIP}/ModelMetadata": MethodCall(OK, _named(pb.ModelMetadataRequest)),
    f"{OIP}/ModelConfig": MethodCall(OK, _named(pb.ModelConfigRequest)),
    f"{OIP}/ModelStatistics": MethodCall(OK, _named(pb.ModelStatisticsRequest)),
    f"{OIP}/ModelInfer": MethodCall(OK, _infer),
    f"{OIP}/ModelStreamInfer": MethodCall(OK, _infer),
    f"{OIP}/RepositoryIndex": MethodCall(OK, _plain(pb.RepositoryIndexRequest)),
    f"{OIP}/RepositoryModelLoad": MethodCall(OK, _model_named(pb.RepositoryModelLoadRequest)),
    f"{OIP}/RepositoryModelUnload": MethodCall(OK, _model_named(pb.RepositoryModelUnloadRequest)),
    f"{OIP}/TraceSetting": MethodCall(OK, _model_named(pb.TraceSettingRequest)),
    f"{OIP}/LogSettings": MethodCall(OK, _silent, other=DENIED),
    f"{OIP}/SystemSharedMemoryStatus": MethodCall(OK, _plain(pb.SystemSharedMemoryStatusRequest)),
    f"{OIP}/SystemSharedMemoryRegister": MethodCall(
        INVALID,
        _plain(pb.SystemSharedMemoryRegisterRequest, name="r", key="/no/object", byte_size=16),
    ),
    f"{OIP}/SystemSharedMemoryUnregister": MethodCall(
        OK, _plain(pb.SystemSharedMemoryUnregisterRequest)
    ),
    f"{OIP}/CudaSharedMemoryStatus": MethodCall(OK, _plain(pb.CudaSharedMemoryStatusRequest)),
    f"{OIP}/CudaSharedMemoryRegister": MethodCall(
        UNIMPLEMENTED, _plain(pb.CudaSharedMemoryRegisterRequest, name="r")
    ),
    f"{OIP}/CudaSharedMemoryUnregister": MethodCall(
        OK, _plain(pb.CudaSharedMemoryUnregisterRequest)
    ),
    f"{HEALTH}/Check": MethodCall(OK, _plain(health_pb2.HealthCheckRequest)),
    f"{HEALTH}/List": MethodCall(OK, _plain(health_pb2.HealthListRequest)),
    f"{HEALTH}/Watch": MethodCall(OK, _plain(health_pb2.HealthCheckRequest)),
    **{
        f"{service}/ServerReflectionInfo": MethodCall(
            OK, _plain(reflection_pb2.ServerReflectionRequest, list_services="*")
        )
        for service in REFLECTION
    },
    f"{PREDICTION_SERVICE}/Predict": MethodCall(OK, _predict),
    f"{PREDICTION_SERVICE}/Classify": MethodCall(
        INVALID, _of_spec(serving_pb2.ClassificationRequest)
    ),
    f"{PREDICTION_SERVICE}/Regress": MethodCall(INVALID, _of_spec(serving_pb2.RegressionRequest)),
    f"{PREDICTION_SERVICE}/MultiInference": MethodCall(INVALID, _multi),
    f"{PREDICTION_SERVICE}/GetModelMetadata": MethodCall(OK, _metadata),
    f"{MODEL_SERVICE}/GetModelStatus": MethodCall(OK, _of_spec(serving_pb2.GetModelStatusRequest)),
    f"{MODEL_SERVICE}/HandleReloadConfigRequest": MethodCall(OK, _reload, other=DENIED),
    f"{INFERENCE_SERVICE}/Ping": MethodCall(OK, _plain(empty_pb2.Empty)),
    f"{INFERENCE_SERVICE}/Predictions": MethodCall(OK, _prediction),
    f"{INFERENCE_SERVICE}/StreamPredictions": MethodCall(OK, _prediction),
    f"{INFERENCE_SERVICE}/StreamPredictions2": MethodCall(OK, _prediction),
    f"{MANAGEMENT_SERVICE}/DescribeModel": MethodCall(
        OK, _model_named(management.DescribeModelRequest)
    ),
    f"{MANAGEMENT_SERVICE}/ListModels": MethodCall(OK, _plain(management.ListModelsRequest)),
    f"{MANAGEMENT_SERVICE}/RegisterModel": MethodCall(
        grpc.StatusCode.ABORTED, lambda model: management.RegisterModelRequest(url=model)
    ),
    f"{MANAGEMENT_SERVICE}/ScaleWorker": MethodCall(
        OK, _model_named(management.ScaleWorkerRequest)
    ),
    f"{MANAGEMENT_SERVICE}/SetDefault": MethodCall(
        OK, _model_named(management.SetDefaultRequest, model_version="1")
    ),
    f"{MANAGEMENT_SERVICE}/UnregisterModel": MethodCall(
        OK, _model_named(management.UnregisterModelRequest)
    ),
}
#: Probes of the server are open; that of a model needs a rule.
OPEN = (
    f"{OIP}/ServerLive", f"{OIP}/ServerReady", f"{HEALTH}/Check", f"{HEALTH}/List",
    f"{HEALTH}/Watch", f"{INFERENCE_SERVICE}/Ping",
)  # fmt: skip


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[AccessGateway]:
    async with serving(tmp_path, RULES, *CALLERS, allow_client_shm=True) as running:
        yield running


class MethodAnswer(NamedTuple):
    """The end of a call, and its responses without the model's name."""

    status: grpc.StatusCode
    details: str
    replies: tuple[bytes, ...]


class MethodCaller:
    """Calls methods for all kinds of callers."""

    def __init__(self, gateway: AccessGateway, channel: grpc.aio.Channel) -> None:
        self._gateway, self._channel = gateway, channel
        self._methods: dict[str, Method] = {
            f"{service}/{name}": method
            for service, rows in gateway.server.dialects.grpc.items()
            for name, method in rows.items()
        }

    def _stream(self, path: str, content: bytes, metadata: Any) -> list[bytes]:
        """Call a method whose requests are a stream.

        To ``grpc.aio`` a stream that ends before it has written is an error of its own.
        """
        with grpc.insecure_channel(self._gateway.grpc_target) as connected:
            call = connected.stream_stream(f"/{path}")
            return list(call(iter([content]), metadata=metadata))

    async def call(self, caller: str, path: str, message: Any, model: str = MINE) -> MethodAnswer:
        method, content = self._methods[path], message.SerializeToString()
        metadata = tuple(self._gateway.headers(caller).items())
        replies: list[bytes] = []
        status, details = OK, ""
        try:
            if method.request_streams:
                replies = await asyncio.to_thread(self._stream, path, content, metadata)
            elif method.reply_streams:
                stream = self._channel.unary_stream(f"/{path}")(content, metadata=metadata)
                async for reply in stream:
                    replies.append(reply)
                    if path.endswith("/Watch"):
                        stream.cancel()
                        break
            else:
                replies = [await self._channel.unary_unary(f"/{path}")(content, metadata=metadata)]
        except grpc.RpcError as error:
            status, details = error.code(), str(error.details())
        if caller == "right":
            manager = self._gateway.server.manager
            if all(state is not VersionState.READY for _, state, _ in manager.states(MINE)):
                await manager.load(MINE)
        name = model.encode()
        return MethodAnswer(
            status,
            details.replace(model, "NAME"),
            tuple(reply.replace(name, b"NAME") for reply in replies),
        )


async def test_every_method_has_exactly_the_expected_status_for_every_caller(
    gateway: AccessGateway,
) -> None:
    async with channel(gateway) as connected:
        peer = MethodCaller(gateway, connected)
        assert peer._methods.keys() == CALLS.keys()
        for path, case in CALLS.items():
            for nobody in ("none", "wrong", "expired"):
                answer = await peer.call(nobody, path, case.message(MINE))
                opened = nobody == "none" and path in OPEN
                assert answer.status is (case.right if opened else UNAUTHENTICATED), (path, nobody)
            answer = await peer.call("idle", path, case.message(MINE))
            assert answer.status is (case.right if path in OPEN else DENIED), path
            forbidden = await peer.call("other", path, case.message(MINE))
            if case.message(MINE) != case.message(UNKNOWN):
                unknown = await peer.call("other", path, case.message(UNKNOWN), UNKNOWN)
                assert forbidden == unknown, path
                truly_unknown = await peer.call("right", path, case.message(UNKNOWN), UNKNOWN)
                assert truly_unknown == unknown, path
            else:
                assert forbidden.status is (case.other or case.right), path
                assert not any(b"NAME" in reply for reply in forbidden.replies), path
            right = await peer.call("right", path, case.message(MINE))
            assert right.status is case.right, (path, right)
            if case.message(MINE) != case.message(UNKNOWN) and "Unload" not in path:
                assert right != forbidden, path


async def test_a_call_without_a_right_ends_before_its_message_comes(
    gateway: AccessGateway,
) -> None:
    sent = asyncio.Event()

    async def messages() -> AsyncIterator[bytes]:
        await sent.wait()  # never: the call has ended by then
        yield b""

    async with channel(gateway) as connected:
        for caller, status in (("none", UNAUTHENTICATED), ("idle", DENIED)):
            metadata = tuple(gateway.headers(caller).items())
            method = connected.stream_unary(f"/{OIP}/ModelInfer")
            call = method(messages(), metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is status


async def test_a_name_of_a_megabyte_is_refused_before_it_is_looked_up(
    gateway: AccessGateway,
) -> None:
    name = "m" * 2**20
    async with channel(gateway) as connected:
        peer = MethodCaller(gateway, connected)
        for path, method in peer._methods.items():
            if method.operation is not Operation.INFER or method.request_streams:
                continue
            for caller in ("right", "other"):
                answer = await peer.call(caller, path, CALLS[path].message(name))
                # The Open Inference Protocol finds no model of the name's beginning.
                oip = path.startswith("inference.")
                assert answer.status is (NOT_FOUND if oip else INVALID), (path, caller)
                assert len(answer.details) < 2500, (path, caller)


async def test_a_connection_is_not_trusted_because_an_earlier_call_was(
    gateway: AccessGateway,
) -> None:
    async with channel(gateway) as connected:
        peer, path = MethodCaller(gateway, connected), f"{OIP}/ServerMetadata"
        message = pb.ServerMetadataRequest()
        for _ in range(3):
            assert (await peer.call("right", path, message)).status is OK
            assert (await peer.call("wrong", path, message)).status is UNAUTHENTICATED
            assert (await peer.call("none", path, message)).status is UNAUTHENTICATED


def test_a_method_without_an_operation_cannot_be_made() -> None:
    async def handler(message: Any, _: Any) -> Any:
        return message

    with pytest.raises(TypeError, match="operation"):
        Method(empty_pb2.Empty, empty_pb2.Empty, handler)  # type: ignore[call-arg]
