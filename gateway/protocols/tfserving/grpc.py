"""TensorFlow Serving over gRPC: PredictionService and ModelService.

Specification: TensorFlow Serving's ``apis/*.proto``, ``prediction_service_impl.cc`` and
``model_service_impl.cc``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import InvalidArgument, ModelportError, Unsupported
from modelport.gateway.models.model import VersionSettings
from modelport.gateway.protocols import response_encoding
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.grpc_method import Method, Serialized
from modelport.gateway.protocols.response_encoding import PROTOBUF_BYTES
from modelport.gateway.protocols.tfserving import MODEL_SERVICE, PREDICTION_SERVICE, results
from modelport.gateway.protocols.tfserving.grpc_request import (
    PredictMessage,
    SizedMessage,
    TfServingRequest,
)
from modelport.gateway.protocols.tfserving.inference import (
    CLASSIFY,
    REGRESS,
    ExampleMethod,
    Inference,
    TfServingCall,
)
from modelport.gateway.protocols.tfserving.servable_signatures import (
    MAX_NAME,
    SIGNATURE,
    STATUSES,
    Decoded,
    FailedPrecondition,
    Selected,
    ServableSignature,
    ServableVersion,
    SignatureTensor,
    UnknownSignature,
    code,
)
from modelport.gateway.repository.version_policy import VersionPolicy
from modelport.gateway.types import Datatype, Deadline, Tensor
from modelport.gateway.wire import incremental_protobuf, tensor_proto
from modelport.gateway.wire.proto import serving_pb2 as pb
from modelport.gateway.wire.protobuf import nested, tag
from modelport.gateway.wire.raw_tensors import Buffer

_SIGNATURE_DEF = "signature_def"
_DT_STRING = tensor_proto.DTYPES[Datatype.BYTES]

#: Limit of the tasks of a MultiInference request, which are for different signatures.
MAX_TASKS = 1000
_MODEL_SPEC = tag(pb.PredictRequest, "model_spec")
_TASKS = tag(pb.MultiInferenceRequest, "tasks")
_OUTPUTS = tag(pb.PredictResponse, "outputs")
_RESULTS = tag(pb.MultiInferenceResponse, "results")

Handler = Callable[[Any, Deadline], Awaitable[Any]]


class _ExampleApi(NamedTuple):
    """Classify or Regress in gRPC.

    Attributes:
        reply: The message class of a response.
        result: The tag of its result.
        task_result: The tag of the result of a task of MultiInference.
        fields: Encodes a result.
    """

    method: ExampleMethod
    reply: Any
    result: int
    task_result: int
    fields: Callable[[Any], list[Buffer]]


_CLASSIFY = _ExampleApi(
    CLASSIFY,
    pb.ClassificationResponse,
    tag(pb.ClassificationResponse, "result"),
    tag(pb.InferenceResult, "classification_result"),
    results.classification_fields,
)
_REGRESS = _ExampleApi(
    REGRESS,
    pb.RegressionResponse,
    tag(pb.RegressionResponse, "result"),
    tag(pb.InferenceResult, "regression_result"),
    results.regression_fields,
)
#: By the ``method_name`` of a task of MultiInference.
_TASK_METHODS = {
    "tensorflow/serving/classify": _CLASSIFY,
    "tensorflow/serving/regress": _REGRESS,
}


class TfServingGrpc:
    """The methods of ``PredictionService`` and ``ModelService``."""

    def __init__(self, host: DialectHost) -> None:
        self._inference = Inference(host)
        self._control = host.control

    def methods(self) -> dict[str, dict[str, Method]]:
        """Return the methods by service and name."""

        def method(messages: str, handler: Handler, operation: Operation) -> Method:
            request, reply = getattr(pb, f"{messages}Request"), getattr(pb, f"{messages}Response")
            return Method(request, reply, handler, operation, statuses=STATUSES)

        def inference(
            messages: str, handler: Handler, bound: Callable[[Buffer], int | None] = self._bound
        ) -> Method:
            declared = method(messages, handler, Operation.INFER)
            is_predict = declared.request is pb.PredictRequest
            kind = PredictMessage() if is_predict else SizedMessage(declared.request)
            return declared._replace(request=kind, bound=bound)

        predict = self._counted("Predict", self._predict)
        classify = self._counted("Classify", partial(self._examples, _CLASSIFY))
        regress = self._counted("Regress", partial(self._examples, _REGRESS))
        return {
            PREDICTION_SERVICE: {
                "Predict": inference("Predict", predict),
                "Classify": inference("Classification", classify),
                "Regress": inference("Regression", regress),
                "MultiInference": inference("MultiInference", self._multi, self._bound_multi),
                "GetModelMetadata": method("GetModelMetadata", self._metadata, Operation.METADATA),
            },
            MODEL_SERVICE: {
                "GetModelStatus": method("GetModelStatus", self._status, Operation.METADATA),
                "HandleReloadConfigRequest": method(
                    "ReloadConfig", self._reload, Operation.CONTROL
                ),
            },
        }

    def _bound(self, content: Buffer) -> int | None:
        """Return the size limit of a message, which must begin with its ``ModelSpec``."""
        spec = incremental_protobuf.first(content, _MODEL_SPEC)
        if spec is None:
            raise InvalidArgument("a large request must begin with its model_spec")
        try:
            message = pb.PredictRequest(model_spec=pb.ModelSpec.FromString(spec))
        except DecodeError as error:
            raise InvalidArgument("the model_spec is not a valid ModelSpec message") from error
        return self._inference.servables.version(_selected(message)).max_bytes

    def _bound_multi(self, content: Buffer) -> int | None:
        """Return the size limit of a MultiInference request, by its first task."""
        task = incremental_protobuf.first(content, _TASKS)
        if task is None:
            raise InvalidArgument("a large request must begin with its tasks")
        return self._bound(task)

    def _counted(self, api: str, handler: Handler) -> Handler:
        async def counted(request: TfServingRequest, deadline: Deadline) -> Any:
            started, status = time.perf_counter_ns(), "INTERNAL"
            try:
                reply = await handler(request, deadline)
                status = "OK"
                return reply
            except ModelportError as error:
                status = code(error)
                raise
            except asyncio.CancelledError:
                status = "CANCELLED"
                raise
            finally:
                name = request.message.model_spec.name
                self._inference.record(name, api, "GRPC", status, started)

        return counted

    # -- inference ------------------------------------------------------------------------------

    async def _predict(self, request: TfServingRequest, deadline: Deadline) -> Serialized:
        message = request.message

        def decode(version: ServableVersion) -> Decoded:
            try:
                servable = version.servable(message.model_spec.signature_name)
            except UnknownSignature as error:
                raise FailedPrecondition(
                    f'Serving signature key "{error.name}" not found.'
                ) from error
            servable.check_inputs(request.names())
            wanted = _filter(message.output_filter, servable)
            inputs = [_input(servable.inputs[name], request) for name in request.names()]
            return Decoded(servable, inputs, wanted)

        decoded, outputs = await self._inference.predict(
            TfServingCall(_selected(message), deadline, size=request.size),
            decode,
            images=any(t.dtype == _DT_STRING for t in message.inputs.values()),
        )
        work = partial(_prediction, decoded.servable, outputs)
        return await response_encoding.encode(work, outputs, deadline, PROTOBUF_BYTES)

    async def _examples(
        self, api: _ExampleApi, request: TfServingRequest, deadline: Deadline
    ) -> Serialized:
        message = request.message
        call = TfServingCall(_selected(message), deadline, size=request.size)

        def write(servable: ServableSignature, found: Any) -> Serialized:
            head = api.reply(model_spec=_spec(servable)).SerializeToString()
            return Serialized([head, *nested(api.result, api.fields(found))])

        return await self._inference.run_examples(call, message.input, api.method, write)

    async def _multi(self, request: TfServingRequest, deadline: Deadline) -> Serialized:
        """Run the tasks, which are all for one model, one after the other."""
        message = request.message
        self._check_tasks(message.tasks)
        fields: list[Buffer] = []
        for task in message.tasks:
            call = TfServingCall(_selected(task), deadline, size=request.size)
            api = _TASK_METHODS[task.method_name]
            write = partial(_task_result, api)
            fields += await self._inference.run_examples(call, message.input, api.method, write)
        return Serialized(fields)

    def _check_tasks(self, tasks: Sequence[Any]) -> None:
        if not tasks:
            raise InvalidArgument("Inference request must have at least one InferenceTask")
        if len(tasks) > MAX_TASKS:
            raise InvalidArgument(f"the request has {len(tasks)} tasks, at most {MAX_TASKS}")
        if len({task.model_spec.name for task in tasks}) > 1:
            raise InvalidArgument(
                "All ModelSpecs in a MultiInferenceRequest must access the same model name."
            )
        seen = set()
        for task in tasks:
            selected = _selected(task)
            signature = selected.signature or SIGNATURE
            # A model other than a SavedModel has one signature for both methods.
            evaluation = (signature, task.method_name)
            if evaluation in seen:
                raise InvalidArgument(f"Duplicate evaluation of signature: {signature[:MAX_NAME]}")
            seen.add(evaluation)
            try:
                self._inference.servables.find(selected)
            except UnknownSignature as error:
                raise InvalidArgument(
                    f"Requested signature not found in model graph: {error.name}"
                ) from error
            if task.method_name not in _TASK_METHODS:
                raise Unsupported(f"Unsupported signature method_name: {task.method_name[:256]}")

    # -- metadata and state ---------------------------------------------------------------------

    async def _metadata(self, message: Any, _: Deadline) -> pb.GetModelMetadataResponse:
        selected = _selected(message)
        if not message.metadata_field:
            raise InvalidArgument(
                "GetModelMetadataRequest must specify at least one metadata_field"
            )
        for field in message.metadata_field:
            if field != _SIGNATURE_DEF:
                raise InvalidArgument(f"Metadata field {field[:256]} is not supported")
        version = self._inference.servables.version(selected)
        reply = pb.GetModelMetadataResponse(model_spec=pb.ModelSpec(name=version.name))
        reply.model_spec.version.value = version.number
        reply.metadata[_SIGNATURE_DEF].Pack(version.signature_map)
        return reply

    async def _status(self, message: Any, _: Deadline) -> pb.GetModelStatusResponse:
        return await self._inference.servables.status(_selected(message))

    async def _reload(self, message: Any, _: Deadline) -> pb.ReloadConfigResponse:
        """Serve exactly the listed models, which must be in the repository."""
        if message.config.WhichOneof("config") != "model_config_list":
            raise InvalidArgument(
                "ServerModelConfig type not supported by HandleReloadConfigRequest. Only "
                "ModelConfigList is currently supported"
            )
        wanted: dict[str, VersionSettings] = {}
        for config in message.config.model_config_list.config:
            if config.name in wanted:
                raise InvalidArgument(
                    f"Illegal to list model {config.name} multiple times in config list"
                )
            wanted[config.name] = _wanted(config)
        await self._control.reload(wanted)
        reply = pb.ReloadConfigResponse()
        reply.status.SetInParent()
        for name in message.metric_names:
            reply.metric.add(name=name, int64_value_increase=0)
        return reply


def _selected(message: Any) -> Selected:
    """Read ``message.model_spec``; the lookup refuses empty names."""
    if not message.HasField("model_spec"):
        raise InvalidArgument("Missing ModelSpec")
    spec = message.model_spec
    choice = spec.WhichOneof("version_choice")
    if choice == "version":
        return Selected(spec.name, spec.version.value, signature=spec.signature_name)
    return Selected(spec.name, label=spec.version_label or None, signature=spec.signature_name)


def _spec(servable: ServableSignature) -> pb.ModelSpec:
    spec = pb.ModelSpec(name=servable.name, signature_name=servable.signature_name)
    spec.version.value = servable.number
    return spec


def _prediction(servable: ServableSignature, outputs: Sequence[Tensor]) -> Serialized:
    parts: list[Buffer] = [pb.PredictResponse(model_spec=_spec(servable)).SerializeToString()]
    for tensor in outputs:
        parts += tensor_proto.values_entry(_OUTPUTS, tensor)
    return Serialized(parts)


def _task_result(api: _ExampleApi, servable: ServableSignature, found: Any) -> list[Buffer]:
    """Encode a result of MultiInference."""
    head = pb.InferenceResult(model_spec=_spec(servable)).SerializeToString()
    return nested(_RESULTS, [head, *nested(api.task_result, api.fields(found))])


def _filter(names: Sequence[str], servable: ServableSignature) -> tuple[str, ...]:
    for name in names:
        if name not in servable.outputs:
            expected = ",".join(sorted(servable.outputs))
            raise InvalidArgument(
                f"output tensor alias not found in signature: {name[:256]} Outputs expected to be "
                f"in the set {{{expected}}}."
            )
    if len(set(names)) != len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise InvalidArgument(f"duplicate output tensor alias: {twice}")
    return tuple(names)


def _input(spec: SignatureTensor, request: TfServingRequest) -> Tensor:
    large = request.tensors.get(spec.name)
    if large is None:
        tensor = tensor_proto.decode(spec.name, request.message.inputs[spec.name])
    else:
        tensor = tensor_proto.decode_large(spec.name, large)
    if tensor.datatype is Datatype.BYTES and spec.image is not None:
        encoded = tensor.data.reshape(-1).tolist()
        tensor.data = spec.images(encoded, tensor.data.shape)
        tensor.datatype = spec.datatype
    return tensor


def _wanted(config: pb.ModelConfig) -> VersionSettings:
    """Convert one entry of a reload request.

    Raises:
        InvalidArgument: Its path is not that of the model in the repository.
    """
    last = config.base_path.rstrip("/").rpartition("/")[2]
    if config.base_path and last != config.name:
        raise InvalidArgument(
            f"base_path of model '{config.name}' must be empty or end in its name: models are "
            "served from the model repository, under the names of their folders"
        )
    asked = config.model_version_policy
    policy = VersionPolicy.of(asked) if asked.WhichOneof("policy_choice") else None
    return VersionSettings(policy, dict(config.version_labels) or None)
