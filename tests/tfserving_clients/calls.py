"""Every method of the official stubs, as their users call them: ``calls.py GRPC HTTP``.

Runs where ``tensorflow-serving-api`` is installed, and imports nothing of this project.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    input_pb2,
    model_management_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

TIMEOUT = 30.0
TYPES = {
    "bool": tf.bool, "uint8": tf.uint8, "uint16": tf.uint16, "uint32": tf.uint32,
    "uint64": tf.uint64, "int8": tf.int8, "int16": tf.int16, "int32": tf.int32, "int64": tf.int64,
    "fp16": tf.float16, "fp32": tf.float32, "fp64": tf.float64, "bf16": tf.bfloat16,
    "bytes": tf.string,
}  # fmt: skip
ROW = np.array([[1, 2, 3, 4]], np.float32)


class Stubs:
    def __init__(self, channel: Any) -> None:
        self.prediction = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        self.model = model_service_pb2_grpc.ModelServiceStub(channel)


def request(model: str, tensors: dict[str, Any], **spec: Any) -> Any:
    message = predict_pb2.PredictRequest()
    fill(message.model_spec, model, **spec)
    for name, value in tensors.items():
        message.inputs[name].CopyFrom(tf.make_tensor_proto(value))
    return message


def fill(
    spec: Any, name: str, version: int | None = None, label: str = "", signature: str = ""
) -> None:
    spec.name, spec.signature_name = name, signature
    if version is not None:
        spec.version.value = version
    if label:
        spec.version_label = label


def example(values: list[float], name: str = "x") -> Any:
    feature = tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Example(features=tf.train.Features(feature={name: feature}))


def equal(got: Any, wanted: Any) -> None:
    assert got == wanted, f"{got!r} is not {wanted!r}"


def refused(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        reply = call()
    except grpc.RpcError as error:
        return error.code().name, error.details()
    raise AssertionError(f"not refused: {reply}")


# -- what is asked ---------------------------------------------------------------------------------


def every_dtype(stubs: Stubs, _: str) -> None:
    for name, dtype in TYPES.items():
        if dtype == tf.string:
            value = np.array([["a", "é", ""]], object)
            wanted = [[b"a", "é".encode(), b""]]
        else:
            value = np.array([[0, 1, 1]]).astype(dtype.as_numpy_dtype)
            wanted = value.tolist()
        for how in (tf.make_tensor_proto(value), from_values(value, dtype)):
            message = predict_pb2.PredictRequest()
            fill(message.model_spec, f"identity_{name}")
            message.inputs["x"].CopyFrom(how)
            got = tf.make_ndarray(stubs.prediction.Predict(message, TIMEOUT).outputs["y"])
            equal((got.tolist(), got.shape), (wanted, (1, 3)))


def from_values(value: Any, dtype: Any) -> Any:
    """With ``*_val`` fields, as ``make_tensor_proto`` makes it of a list."""
    items = [str(v) for v in value[0]] if dtype == tf.string else value.tolist()
    items = [items] if dtype == tf.string else items
    return tf.make_tensor_proto(items, dtype=dtype, shape=value.shape)


def single_value_is_broadcast(stubs: Stubs, _: str) -> None:
    message = predict_pb2.PredictRequest()
    fill(message.model_spec, "m")
    message.inputs["x"].CopyFrom(tf.make_tensor_proto(3.0, shape=[2, 4]))
    assert len(message.inputs["x"].float_val) == 1
    reply = stubs.prediction.Predict(message, TIMEOUT)
    equal(list(reply.outputs["y"].float_val), [6.0] * 8)


def scalars_in_the_models_shape(stubs: Stubs, _: str) -> None:
    reply = stubs.prediction.Predict(request("scalar", {"x": np.float32([1, 2])}), TIMEOUT)
    equal(tf.make_ndarray(reply.outputs["y"]).tolist(), [1.0, 2.0])


def versions_and_labels(stubs: Stubs, _: str) -> None:
    for spec, version in (({}, 2), ({"version": 1}, 1), ({"label": "stable"}, 1)):
        reply = stubs.prediction.Predict(request("m", {"x": ROW}, **spec), TIMEOUT)
        equal(tf.make_ndarray(reply.outputs["y"]).tolist(), (ROW * version).tolist())
        spec_back = reply.model_spec
        equal((spec_back.name, spec_back.version.value), ("m", version))
        equal(spec_back.signature_name, "serving_default")


def output_filter(stubs: Stubs, _: str) -> None:
    message = request("two", {"a": ROW, "b": ROW})
    equal(sorted(stubs.prediction.Predict(message, TIMEOUT).outputs), ["difference", "total"])
    message.output_filter.append("total")
    equal(list(stubs.prediction.Predict(message, TIMEOUT).outputs), ["total"])


def futures_and_asyncio(stubs: Stubs, address: str) -> None:
    futures = [
        stubs.prediction.Predict.future(request("m", {"x": ROW * n}), TIMEOUT) for n in range(64)
    ]
    for n, future in enumerate(futures):
        got = tf.make_ndarray(future.result().outputs["y"])
        equal(got.tolist(), (ROW * n * 2).tolist())

    async def ask() -> list[Any]:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
            calls = (stub.Predict(request("m", {"x": ROW * n}), timeout=TIMEOUT) for n in range(64))
            return list(await asyncio.gather(*calls))

    for n, reply in enumerate(asyncio.run(ask())):
        equal(tf.make_ndarray(reply.outputs["y"]).tolist(), (ROW * n * 2).tolist())


def large_tensors(stubs: Stubs, address: str) -> None:
    data = np.random.default_rng(1).random((8, 1 << 18), np.float32)  # 8 MB
    options = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
    with grpc.insecure_channel(address, options) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        reply = stub.Predict(request("identity_fp32", {"x": data}), TIMEOUT)
    assert np.array_equal(tf.make_ndarray(reply.outputs["y"]), data)


def metadata(stubs: Stubs, http: str) -> None:
    message = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    fill(message.model_spec, "two")
    reply = stubs.prediction.GetModelMetadata(message, TIMEOUT)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert reply.metadata["signature_def"].Unpack(signatures)
    signature = signatures.signature_def["serving_default"]
    equal(signature.method_name, tf.saved_model.PREDICT_METHOD_NAME)
    equal(sorted(signature.inputs), ["a", "b"])
    info = signature.outputs["total"]
    equal(
        (info.dtype, [d.size for d in info.tensor_shape.dim]),
        (tf.float32.as_datatype_enum, [-1, -1]),
    )
    equal((reply.model_spec.name, reply.model_spec.version.value), ("two", 1))


def classify_and_regress(stubs: Stubs, _: str) -> None:
    rows = [[0.5, 0.25, 0.125], [1.0, 2.0, 3.0]]
    message = classification_pb2.ClassificationRequest()
    fill(message.model_spec, "scores")
    message.input.example_list.examples.extend(example(row) for row in rows)
    result = stubs.prediction.Classify(message, TIMEOUT).result
    equal([[c.score for c in row.classes] for row in result.classifications], rows)
    equal([c.label for c in result.classifications[0].classes], ["cat", "dog", "owl"])
    regression = regression_pb2.RegressionRequest()
    fill(regression.model_spec, "sum")
    listed = regression.input.example_list_with_context
    listed.context.CopyFrom(example([1, 1, 1, 1]))
    listed.examples.extend([tf.train.Example(), example([1, 2, 3, 4])])
    reply = stubs.prediction.Regress(regression, TIMEOUT)
    equal([r.value for r in reply.result.regressions], [2.0, 5.0])
    multi = inference_pb2.MultiInferenceRequest(
        input=input_pb2.Input(example_list=input_pb2.ExampleList(examples=[example([1, 2, 3, 4])]))
    )
    fill(multi.tasks.add(method_name=tf.saved_model.REGRESS_METHOD_NAME).model_spec, "sum")
    results = stubs.prediction.MultiInference(multi, TIMEOUT).results
    equal(results[0].regression_result.regressions[0].value, 5.0)


def errors(stubs: Stubs, _: str) -> None:
    ask = stubs.prediction.Predict
    for message, wanted in (
        (request("no", {}), ("NOT_FOUND", "Servable not found for request: Latest(no)")),
        (
            request("m", {}, version=9),
            ("NOT_FOUND", "Servable not found for request: Specific(m, 9)"),
        ),
        (
            request("m", {}, label="canary"),
            ("INVALID_ARGUMENT", "Unrecognized servable version label: canary"),
        ),
        (
            request("m", {"x": ROW}, signature="other"),
            ("FAILED_PRECONDITION", 'Serving signature key "other" not found.'),
        ),
        (predict_pb2.PredictRequest(), ("INVALID_ARGUMENT", "Missing ModelSpec")),
    ):
        equal(refused(lambda m=message: ask(m, TIMEOUT)), wanted)
    equal(refused(lambda: ask(request("m", {"x": ROW[:, :3]}), TIMEOUT))[0], "INVALID_ARGUMENT")
    slow = request("slow", {"x": np.array([[1]])})
    equal(refused(lambda: ask(slow, 0.1))[0], "DEADLINE_EXCEEDED")


def status_and_reload(stubs: Stubs, _: str) -> None:
    status = get_model_status_pb2.GetModelStatusRequest()
    fill(status.model_spec, "m")
    rows = stubs.model.GetModelStatus(status, TIMEOUT).model_version_status
    available = get_model_status_pb2.ModelVersionStatus.AVAILABLE
    equal([(row.version, row.state, row.status.error_code) for row in rows],
          [(1, available, 0), (2, available, 0)])  # fmt: skip
    message = model_management_pb2.ReloadConfigRequest()
    config = message.config.model_config_list.config.add(
        name="m", base_path="/models/m", model_platform="tensorflow"
    )
    config.model_version_policy.specific.versions.append(1)
    config.version_labels["canary"] = 1
    reply = stubs.model.HandleReloadConfigRequest(message, TIMEOUT)
    equal(reply.status.error_code, 0)
    got = stubs.prediction.Predict(request("m", {"x": ROW}, label="canary"), TIMEOUT)
    equal(tf.make_ndarray(got.outputs["y"]).tolist(), ROW.tolist())
    end, give_up = get_model_status_pb2.ModelVersionStatus.END, time.monotonic() + TIMEOUT
    found = []
    while found != [(1, available), (2, end)]:  # a reload does not wait for what it unloads
        assert time.monotonic() < give_up, found
        rows = stubs.model.GetModelStatus(status, TIMEOUT).model_version_status
        found = [(row.version, row.state) for row in rows]
    assert refused(lambda: stubs.prediction.Predict(request("two", {"a": ROW, "b": ROW}), TIMEOUT))
    config.base_path = "/elsewhere"
    equal(
        refused(lambda: stubs.model.HandleReloadConfigRequest(message, TIMEOUT))[0],
        "INVALID_ARGUMENT",
    )


def rest_is_bit_equal(stubs: Stubs, address: str) -> None:
    chance = np.random.default_rng(5)
    data = chance.integers(0, 2**32, (8, 100), np.uint32).view(np.float32)
    data = np.where(np.isfinite(data), data, np.float32(0.1)).astype(np.float32)
    body = json.dumps({"instances": data.tolist()}).encode()
    url = f"http://{HTTP}/v1/models/identity_fp32:predict"
    with urllib.request.urlopen(url, body) as answer:
        rest = np.array(json.load(answer)["predictions"], np.float32)
    reply = stubs.prediction.Predict(request("identity_fp32", {"x": data}), TIMEOUT)
    equal(tf.make_ndarray(reply.outputs["y"]).tobytes(), rest.tobytes())


CHECKS = (
    every_dtype, single_value_is_broadcast, scalars_in_the_models_shape, versions_and_labels,
    output_filter, futures_and_asyncio, large_tensors, metadata, classify_and_regress, errors,
    rest_is_bit_equal, status_and_reload,
)  # fmt: skip
HTTP = ""


def main() -> int:
    global HTTP
    address, HTTP = sys.argv[1:]
    failed = 0
    with grpc.insecure_channel(address) as channel:
        stubs = Stubs(channel)
        for check in CHECKS:
            try:
                check(stubs, address)
            except Exception:
                failed += 1
                print(f"FAILED {check.__name__}\n{traceback.format_exc()}", flush=True)
            else:
                print(f"ok     {check.__name__}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
