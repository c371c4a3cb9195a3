"""No request costs more than its bytes deserve: a sample of ``cost.py``, and a decoder it catches.

``make attacks-cost`` sends all of it.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from modelport.gateway.wire.proto import serving_pb2, tensorflow_pb2, torchserve_inference_pb2
from tests import models
from tests.attacks import cost
from tests.attacks.cost import CostlyRequest, LivenessProbe, Meter
from tests.server import Gateway, serving

SITE = Path(__file__).parent / "cost_site"
#: What a decoder that parses at once, on the event loop, is caught by.
TELLING = "POST /v2/models/open/infer"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return cost.repository(tmp_path / "models")


@pytest.mark.thorough
def test_a_sample_of_every_route_and_method_keeps_the_rule(repository: Path) -> None:
    with serving(repository, "--http-max-input-size", str(cost.MAX_INPUT_BYTES)) as gateway:
        paths = {path for _, path in cost.routes(gateway)}
        assert {"/v2/models/{model}/infer", "/v1/models/{model}:predict"} <= paths
        assert {name for _, name, _ in cost.methods()} >= {"ModelInfer", "Predict", "Predictions"}
        _, found = cost.findings(gateway, 24, seed=0)
    assert found == []


@pytest.mark.thorough
def test_a_decoder_that_parses_at_once_is_caught(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{SITE}{os.pathsep}{Path(__file__).parents[2]}")
    with serving(repository, "--http-max-input-size", str(cost.MAX_INPUT_BYTES)) as gateway:
        probe, meter = LivenessProbe(gateway), Meter(gateway.process.pid)
        wanted = ("oip of fractions, 8000000 bytes, identity", "oip of rows, 8000000 bytes, gzip")
        attacks: list[CostlyRequest] = [
            attack
            for attack in cost.http_attacks(gateway)
            if attack.name.startswith(TELLING) and attack.name.endswith(wanted)
        ]
        try:
            found = [cost.broken(a, cost.measured(gateway, meter, probe, a)) for a in attacks * 2]
        finally:
            probe.close()
    assert len(attacks) == 2
    assert any("everybody else waited" in each for wrong in found for each in wrong), found
    assert any("MB for" in each for wrong in found for each in wrong), found


# -- replies --------------------------------------------------------------------------------------

VALUES = 1 << 22
#: To write ``VALUES`` takes the event loop several times as much, to send them less.
LOOP_SECONDS = 0.06


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A model of ``VALUES`` fractions, one of as many integers, and one of some classes."""
    models.spread(tmp_path / "wide" / "1" / "model.onnx", VALUES)
    text = models.config("wide", ["x FP32 1"], [f"y FP32 {VALUES}"], 1)
    (tmp_path / "wide" / "config.pbtxt").write_text(text)
    outputs = {"integers": f"y INT64 {VALUES}", "classes": f"scores FP32 {VALUES // 8}"}
    for name, output in outputs.items():
        (tmp_path / name / "1").mkdir(parents=True)
        text = models.config(name, ["x UINT8 1"], [output], 8, "fake")
        (tmp_path / name / "config.pbtxt").write_text(text)
    return tmp_path


def loop_seconds(gateway: Gateway) -> float:
    """The CPU time of the thread that the event loop runs in, which is the process's first."""
    pid = gateway.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def large_replies(gateway: Gateway) -> dict[str, Callable[[], int]]:
    """For every dialect, a request with a large reply that returns the number of values in it."""

    def post(path: str, document: Any, **headers: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.http_port, timeout=60)
        try:
            connection.request("POST", path, json.dumps(document), headers)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        assert response.status == 200, body[:200]
        return body

    def call(method: str, request: Any, reply: Any) -> Any:
        with grpc.insecure_channel(
            gateway.grpc, [("grpc.max_receive_message_length", -1)]
        ) as channel:
            send = channel.unary_unary(method, type(request).SerializeToString, reply.FromString)
            return send(request, timeout=60)

    def spec(name: str) -> Any:
        return serving_pb2.ModelSpec(name=name)

    def predict() -> int:
        request = serving_pb2.PredictRequest(model_spec=spec("integers"))
        shape = {"dim": [{"size": 1}, {"size": 1}]}
        x = tensorflow_pb2.TensorProto(dtype=4, tensor_shape=shape, int_val=[1])
        request.inputs["x"].CopyFrom(x)
        reply = call(f"{SERVING}/Predict", request, serving_pb2.PredictResponse)
        return len(reply.outputs["y"].int64_val)

    def classify() -> int:
        request = serving_pb2.ClassificationRequest(model_spec=spec("classes"))
        example = request.input.example_list.examples.add()
        example.features.feature["x"].int64_list.value.append(1)
        reply = call(f"{SERVING}/Classify", request, serving_pb2.ClassificationResponse)
        return 8 * len(reply.result.classifications[0].classes)

    def predictions() -> int:
        request = torchserve_inference_pb2.PredictionsRequest(model_name="wide")
        request.input["data"] = b"[[1]]"
        method = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
        reply = call(method, request, torchserve_inference_pb2.PredictionResponse)
        return reply.prediction.count(b".")

    instances = {"instances": [[1]]}
    oip = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    target = "X-Amzn-SageMaker-Target-Model"
    examples = {"examples": [{"x": 1}]}
    wide = "/v2/models/wide"
    return {
        "infer": lambda: post(f"{wide}/infer", oip).count(b"."),
        "generate": lambda: post(f"{wide}/generate", {"x": 1}).count(b"."),
        "generate_stream": lambda: post(f"{wide}/generate_stream", {"x": 1}).count(b"."),
        "SageMaker": lambda: post("/invocations", instances, **{target: "wide"}).count(b"."),
        "SageMaker's OIP": lambda: post("/models/wide/invoke", oip).count(b"."),
        "TorchServe": lambda: post("/predictions/wide", [[1]]).count(b"."),
        "TorchServe's gRPC": predictions,
        "TensorFlow Serving's REST": lambda: post("/v1/models/wide:predict", instances).count(b"."),
        "Predict": predict,
        "Classify": classify,
        ":classify": lambda: 8 * post("/v1/models/classes:classify", examples).count(b"0.0"),
    }


SERVING = "/tensorflow.serving.PredictionService"


def written_on_the_loop(gateway: Gateway) -> dict[str, float]:
    """The large replies that took the event loop longer than to send them takes, each time."""
    found = {}
    for name, ask in large_replies(gateway).items():
        # The garbage collector may add a tenth of a second to one of them.
        for _ in range(3):
            before = loop_seconds(gateway)
            assert ask() == VALUES, name
            seconds = loop_seconds(gateway) - before
            if seconds <= LOOP_SECONDS:
                break
        else:
            found[name] = seconds
    return found


@pytest.mark.thorough
def test_large_replies_are_written_off_the_event_loop(wide: Path) -> None:
    with serving(wide) as gateway:
        assert written_on_the_loop(gateway) == {}


@pytest.mark.thorough
def test_a_reply_that_is_written_on_the_event_loop_is_caught(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{SITE}{os.pathsep}{Path(__file__).parents[2]}")
    with serving(wide) as gateway:
        missed = large_replies(gateway).keys() - written_on_the_loop(gateway).keys()
    assert missed <= {":classify"}, "whose scores are written by one fast call"
