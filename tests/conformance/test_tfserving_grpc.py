"""TensorFlow Serving's gRPC dialect, message by message."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, Tensor
from modelport.gateway.wire import tensor_proto
from modelport.gateway.wire.proto import serving_pb2 as pb
from modelport.gateway.wire.proto import tensorflow_pb2
from tests.conformance.repository import IDENTITY, SLOW_SECONDS
from tests.server import Gateway

SERVICES = {
    "Predict": ("PredictionService", pb.PredictResponse),
    "Classify": ("PredictionService", pb.ClassificationResponse),
    "Regress": ("PredictionService", pb.RegressionResponse),
    "MultiInference": ("PredictionService", pb.MultiInferenceResponse),
    "GetModelMetadata": ("PredictionService", pb.GetModelMetadataResponse),
    "GetModelStatus": ("ModelService", pb.GetModelStatusResponse),
    "HandleReloadConfigRequest": ("ModelService", pb.ReloadConfigResponse),
}
Ask = Callable[..., Any]
ROW = np.array([[1, 2, 3, 4]], np.float32)


@contextlib.contextmanager
def asking(address: str) -> Iterator[Ask]:
    """``ask(method, message)``; it raises what gRPC raises."""
    with grpc.insecure_channel(address) as channel:

        def ask(method: str, message: Any, timeout: float = 30.0) -> Any:
            service, reply = SERVICES[method]
            call = channel.unary_unary(
                f"/tensorflow.serving.{service}/{method}",
                request_serializer=type(message).SerializeToString,
                response_deserializer=reply.FromString,
            )
            return call(message, timeout=timeout)

        yield ask


@pytest.fixture(scope="module")
def ask(gateway: Gateway) -> Iterator[Ask]:
    with asking(gateway.grpc) as opened:
        yield opened


def predict_request(model: str, inputs: dict[str, Array], **spec: Any) -> pb.PredictRequest:
    message = pb.PredictRequest(model_spec=model_spec(model, **spec))
    for name, data in inputs.items():
        datatype = next(d for d, dtype in NUMPY_DTYPES.items() if dtype == data.dtype)
        message.inputs[name].CopyFrom(tensor_proto.encode(Tensor(name, datatype, data)))
    return message


def model_spec(name: str, version: int = 0, label: str = "", signature: str = "") -> pb.ModelSpec:
    spec = pb.ModelSpec(name=name, signature_name=signature)
    if version:
        spec.version.value = version
    if label:
        spec.version_label = label
    return spec


def output(reply: Any, name: str) -> Array:
    return tensor_proto.decode(name, reply.outputs[name]).data


def refused(ask: Ask, method: str, message: Any, **options: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as raised:
        ask(method, message, **options)
    return raised.value.code().name, raised.value.details()


# -- predict --------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", Datatype)
def test_every_datatype_comes_back_bit_by_bit(ask: Ask, datatype: Datatype) -> None:
    if datatype is Datatype.BYTES:
        data = np.array([["é\0".encode(), b""]], object)
    elif datatype is Datatype.BOOL:
        data = np.array([[True, False]])
    else:
        bits = np.random.default_rng(3).bytes(2 * NUMPY_DTYPES[datatype].itemsize)
        data = np.frombuffer(bits, NUMPY_DTYPES[datatype]).reshape(1, 2)
    message = pb.PredictRequest(model_spec=model_spec(IDENTITY[datatype.value]))
    message.inputs["x"].CopyFrom(tensor_proto.encode(Tensor("x", datatype, data)))
    reply = ask("Predict", message)
    assert not reply.outputs["y"].tensor_content, "clients read the fields of the type"
    assert output(reply, "y").tolist() == data.tolist() or np.isnan(data.astype("f8")).any()
    assert reply.model_spec == pb.ModelSpec(
        name=IDENTITY[datatype.value], version={"value": 1}, signature_name="serving_default"
    )


def test_a_single_value_stands_for_all(ask: Ask) -> None:
    message = pb.PredictRequest(model_spec=model_spec("x2"))
    message.inputs["x"].CopyFrom(
        tensorflow_pb2.TensorProto(dtype=tensorflow_pb2.DT_FLOAT, float_val=[3.0])
    )
    for size in (2, 4):
        message.inputs["x"].tensor_shape.dim.add(size=size)
    assert ask("Predict", message).outputs["y"].float_val == [6.0] * 8


def test_the_models_own_shape_is_spoken_and_the_wires_understood(ask: Ask) -> None:
    for shape in ((2,), (2, 1)):
        data = np.array([1, 2.5], np.float32).reshape(shape)
        reply = ask("Predict", predict_request("scalar", {"x": data}))
        assert output(reply, "y").tolist() == [1.0, 2.5]


def test_versions_and_output_filters(ask: Ask) -> None:
    for version, factor in ((0, 3.0), (1, 2.0), (2, 3.0)):
        reply = ask("Predict", predict_request("two_versions", {"x": ROW}, version=version))
        assert output(reply, "y").tolist() == (ROW * factor).tolist()
        assert reply.model_spec.version.value == (version or 2)
    message = predict_request("add_and_subtract", {"a": ROW, "b": ROW})
    assert set(ask("Predict", message).outputs) == {"total", "difference"}
    message.output_filter.append("difference")
    assert set(ask("Predict", message).outputs) == {"difference"}
    message.output_filter.append("difference")
    assert refused(ask, "Predict", message)[1] == "duplicate output tensor alias: difference"
    message.output_filter[0] = "z"
    assert refused(ask, "Predict", message)[1] == (
        "output tensor alias not found in signature: z Outputs expected to be in the set "
        "{difference,total}."
    )


@pytest.mark.parametrize(
    ("message", "status", "text"),
    [
        (pb.PredictRequest(), "INVALID_ARGUMENT", "Missing ModelSpec"),
        (predict_request("", {}), "INVALID_ARGUMENT", "ModelSpec has no name specified."),
        (predict_request("no", {}), "NOT_FOUND", "Servable not found for request: Latest(no)"),
        (
            predict_request("x2", {}, version=7),
            "NOT_FOUND",
            "Servable not found for request: Specific(x2, 7)",
        ),
        (
            predict_request("x2", {}, version=-1),
            "NOT_FOUND",
            "Servable not found for request: Specific(x2, -1)",
        ),
        (
            predict_request("x2", {}, label="stable"),
            "INVALID_ARGUMENT",
            "Unrecognized servable version label: stable",
        ),
        (
            predict_request("x2", {"x": ROW}, signature="s"),
            "FAILED_PRECONDITION",
            'Serving signature key "s" not found.',
        ),
        (
            predict_request("x2", {"z": ROW}),
            "INVALID_ARGUMENT",
            "input size does not match signature: 1!=1 len({z}) != len({x}). Sent extra: {z}. "
            "Missing but required: {x}.",
        ),
        (
            predict_request("x2", {"x": ROW.astype("f8")}),
            "INVALID_ARGUMENT",
            "inference input 'x' data-type is 'FP64', but model 'x2' expects 'FP32'",
        ),
        (predict_request("failing", {"x": ROW}), "INTERNAL", "the model failed on purpose"),
    ],
)
def test_errors_have_tensorflow_servings_status_and_words(
    ask: Ask, message: Any, status: str, text: str
) -> None:
    assert refused(ask, "Predict", message) == (status, text)


def test_an_expired_deadline_is_deadline_exceeded(ask: Ask) -> None:
    message = predict_request("slow", {"x": np.array([[1]], np.int64)})
    assert refused(ask, "Predict", message, timeout=SLOW_SECONDS / 3)[0] == "DEADLINE_EXCEEDED"


# -- classify, regress, both ----------------------------------------------------------------------


def examples(*rows: list[float], name: str = "x") -> pb.Input:
    message = pb.Input()
    for row in rows:
        example = message.example_list.examples.add()
        example.features.feature[name].float_list.value.extend(row)
    return message


def test_classification(ask: Ask) -> None:
    request = pb.ClassificationRequest(
        model_spec=model_spec("scores"), input=examples([0.25, 0.5, 1], [1, 2, 3])
    )
    reply = ask("Classify", request)
    rows = [[(c.label, c.score) for c in row.classes] for row in reply.result.classifications]
    assert rows[0] == [("cat", 0.25), ("dog", 0.5), ("owl", 1.0)]
    assert [score for _, score in rows[1]] == [1, 2, 3]
    assert reply.model_spec.signature_name == "serving_default"
    empty = pb.ClassificationRequest(model_spec=model_spec("scores"))
    assert refused(ask, "Classify", empty) == ("INVALID_ARGUMENT", "Input is empty.")


def test_regression_with_a_context(ask: Ask) -> None:
    request = pb.RegressionRequest(model_spec=model_spec("scalar"))
    listed = request.input.example_list_with_context
    listed.context.features.feature["x"].float_list.value.append(0.5)
    listed.examples.add()
    listed.examples.add().features.feature["x"].float_list.value.append(2.0)
    reply = ask("Regress", request)
    assert [regression.value for regression in reply.result.regressions] == [0.5, 2.0]


def test_one_input_for_several_tasks(ask: Ask) -> None:
    request = pb.MultiInferenceRequest(input=examples([0.5]))
    request.tasks.add(model_spec=model_spec("scalar"), method_name="tensorflow/serving/regress")
    reply = ask("MultiInference", request)
    assert reply.results[0].regression_result.regressions[0].value == 0.5
    request.tasks[0].method_name = "tensorflow/serving/predict"
    assert refused(ask, "MultiInference", request)[0] == "UNIMPLEMENTED"


# -- metadata and state ---------------------------------------------------------------------------


def test_metadata(ask: Ask) -> None:
    request = pb.GetModelMetadataRequest(model_spec=model_spec("scalar"))
    assert refused(ask, "GetModelMetadata", request)[1].endswith("at least one metadata_field")
    request.metadata_field.append("signature_def")
    reply = ask("GetModelMetadata", request)
    assert (reply.model_spec.name, reply.model_spec.version.value) == ("scalar", 1)
    packed = reply.metadata["signature_def"]
    assert packed.type_url == "type.googleapis.com/tensorflow.serving.SignatureDefMap"
    signature = pb.SignatureDefMap.FromString(packed.value).signature_def["serving_default"]
    assert [dim.size for dim in signature.inputs["x"].tensor_shape.dim] == [-1]
    request.metadata_field.append("other")
    assert refused(ask, "GetModelMetadata", request)[1] == "Metadata field other is not supported"


def test_status(ask: Ask) -> None:
    reply = ask("GetModelStatus", pb.GetModelStatusRequest(model_spec=model_spec("two_versions")))
    states = [(row.version, row.state) for row in reply.model_version_status]
    assert states == [(1, pb.ModelVersionStatus.AVAILABLE), (2, pb.ModelVersionStatus.AVAILABLE)]
    request = pb.GetModelStatusRequest(model_spec=model_spec("no"))
    assert refused(ask, "GetModelStatus", request)[0] == "NOT_FOUND"
