"""Every signature of a SavedModel, in the shapes that its graph takes, as in TensorFlow Serving.

The cases of tensorflow/serving's ``tensorflow_model_server_test.py``, and what a gateway adds:
the same models behind a route, the cache, the batcher and the other dialects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.gateway.wire.proto import serving_pb2 as pb
from tests import half_plus_two
from tests.conformance.test_tfserving_grpc import (
    Ask,
    asking,
    model_spec,
    output,
    predict_request,
    refused,
)
from tests.conformance.wire import KeptConnection, WireReply
from tests.server import Gateway, serving
from tests.upstream import fronting, table

MODEL = "half_plus_two"
CLASSIFY, REGRESS = "tensorflow/serving/classify", "tensorflow/serving/regress"
#: With the cache and the batcher, which must keep signatures apart.
CONFIG = """
backend: "tensorflow" default_model_filename: "model.savedmodel" max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 2000 } response_cache { enable: true }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("signatures") / "models"
    half_plus_two.save(root / MODEL / "123" / "model.savedmodel")
    module = tf.Module()
    anything = tf.TensorSpec(None, tf.float32, "x")
    rows = tf.TensorSpec([None, 2], tf.float32, "x")

    def function(body: Any, spec: Any) -> Any:
        return tf.function(body).get_concrete_function(spec)

    ranks = {
        "serving_default": function(lambda x: {"y": x * 6.0}, anything),
        "custom": function(lambda x: {"y": tf.reduce_sum(x)}, anything),
        "square": function(lambda x: {"y": tf.linalg.matmul(x, x)}, anything),
    }
    tf.saved_model.save(module, str(root / "ranks/1/model.savedmodel"), signatures=ranks)
    (root / "shared").mkdir()
    (root / "shared" / "config.pbtxt").write_text(CONFIG)
    shared = {
        "serving_default": function(lambda x: {"y": x + 1.0}, rows),
        "twice": function(lambda x: {"y": x * 2.0}, rows),
        "thrice": function(lambda x: {"y": x * 3.0}, rows),
    }
    tf.saved_model.save(module, str(root / "shared/1/model.savedmodel"), signatures=shared)
    (root / "declared").mkdir()
    declared = 'input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ' + CONFIG
    (root / "declared" / "config.pbtxt").write_text(declared)
    tf.saved_model.save(module, str(root / "declared/1/model.savedmodel"), signatures=shared)
    return root


@pytest.fixture(scope="module")
def direct(repository: Path) -> Iterator[Gateway]:
    with serving(repository, "--cache-config", "local,size=1048576") as gateway:
        yield gateway


@pytest.fixture(scope="module", params=["", "grpc", "http"], ids=["here", "grpc", "http"])
def gateway(
    request: pytest.FixtureRequest, direct: Gateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """The models here, and behind a route to a server of TensorFlow Serving's protocols."""
    if not request.param:
        yield direct
        return
    address = direct.grpc if request.param == "grpc" else direct.http
    tables = [
        table(name, [address], protocol=request.param, backend="tfserving")
        for name in (MODEL, "ranks", "shared")
    ]
    with fronting(tmp_path_factory.mktemp("routed"), *tables) as front:
        yield front


@pytest.fixture
def rest(gateway: Gateway) -> Iterator[KeptConnection]:
    connection = KeptConnection(gateway.http)
    yield connection
    connection.close()


@pytest.fixture
def ask(gateway: Gateway) -> Iterator[Ask]:
    with asking(gateway.grpc) as opened:
        yield opened


def post(rest: KeptConnection, method: str, document: Any, model: str = MODEL) -> WireReply:
    return rest.send("POST", f"/v1/models/{model}:{method}", json.dumps(document).encode())


def examples(*values: float) -> pb.Input:
    message = pb.Input()
    for value in values:
        feature = message.example_list.examples.add().features.feature["x"]
        feature.float_list.value.append(value)
    return message


def test_the_quick_start_answers(rest: KeptConnection) -> None:
    for values, expected in (
        ([1.0, 2.0, 5.0], [2.5, 3.0, 4.5]),
        ([[1.0], [2.0]], [[2.5], [3.0]]),
        ([[[1.0, 2.0]]], [[[2.5, 3.0]]]),
    ):
        assert post(rest, "predict", {"instances": values}).json == {"predictions": expected}
        assert post(rest, "predict", {"inputs": values}).json == {"outputs": expected}
    assert post(rest, "predict", {"inputs": {"x": 3}}).json == {"outputs": 3.5}
    assert post(rest, "predict", {"instances": [[0.0]] * 9}).json == {"predictions": [[2.0]] * 9}


def test_signatures_are_named_over_rest(rest: KeptConnection) -> None:
    named = {"signature_name": "classify_x_to_y", "examples": [{"x": 2.0}, {"x": 4.0}]}
    assert post(rest, "classify", named).json == {"results": [[["", 3.0]], [["", 4.0]]]}
    named["signature_name"] = "regress_x_to_y2"
    assert post(rest, "regress", named).json == {"results": [4.0, 5.0]}
    row = {"signature_name": "regress_x2_to_y3", "instances": [2.0]}
    assert post(rest, "predict", row).json == {"predictions": [4.0]}


def test_signatures_are_named_over_grpc(ask: Ask) -> None:
    spec = model_spec(MODEL, signature="classify_x_to_y")
    reply = ask("Classify", pb.ClassificationRequest(model_spec=spec, input=examples(2)))
    assert reply.result.classifications[0].classes[0].score == 3.0
    assert reply.model_spec.signature_name == "classify_x_to_y"
    spec = model_spec(MODEL, signature="regress_x_to_y")
    reply = ask("Regress", pb.RegressionRequest(model_spec=spec, input=examples(2, 4)))
    assert [row.value for row in reply.result.regressions] == [3.0, 4.0]
    message = predict_request("ranks", {"x": np.float32([[1, 2], [3, 4]])}, signature="custom")
    reply = ask("Predict", message)
    assert output(reply, "y").tolist() == 10.0
    assert reply.model_spec.signature_name == "custom"


def test_multi_inference_runs_a_signature_for_each_task(ask: Ask) -> None:
    message = pb.MultiInferenceRequest(input=examples(2))
    message.tasks.add(model_spec=model_spec(MODEL, signature="regress_x_to_y"), method_name=REGRESS)
    message.tasks.add(
        model_spec=model_spec(MODEL, signature="classify_x_to_y"), method_name=CLASSIFY
    )
    regression, classification = ask("MultiInference", message).results
    assert regression.regression_result.regressions[0].value == 3.0
    assert classification.classification_result.classifications[0].classes[0].score == 3.0
    names = [each.model_spec.signature_name for each in (regression, classification)]
    assert names == ["regress_x_to_y", "classify_x_to_y"]
    message.tasks.add(model_spec=model_spec(MODEL, signature="regress_x_to_y"), method_name=REGRESS)
    assert refused(ask, "MultiInference", message) == (
        "INVALID_ARGUMENT",
        "Duplicate evaluation of signature: regress_x_to_y",
    )
    message.tasks[2].model_spec.signature_name = "no"
    assert refused(ask, "MultiInference", message) == (
        "INVALID_ARGUMENT",
        "Requested signature not found in model graph: no",
    )


def test_an_unknown_signature_is_refused_in_the_words_of_each_method(
    rest: KeptConnection, ask: Ask
) -> None:
    reply = post(rest, "predict", {"signature_name": "no", "instances": [1.0]})
    assert (reply.status, reply.json) == (
        400,
        {"error": 'Serving signature name: "no" not found in signature def'},
    )
    reply = post(rest, "regress", {"signature_name": "no", "examples": [{"x": 1.0}]})
    assert (reply.status, reply.json["error"]) == (400, "No signature was found with the name: no")
    message = predict_request(MODEL, {"x": np.float32([1])}, signature="no")
    wanted = ("FAILED_PRECONDITION", 'Serving signature key "no" not found.')
    assert refused(ask, "Predict", message) == wanted


def test_the_metadata_holds_every_signature(rest: KeptConnection, ask: Ask) -> None:
    document = rest.send("GET", f"/v1/models/{MODEL}/metadata").json
    assert document["model_spec"] == {"name": MODEL, "signature_name": "", "version": "123"}
    signatures = document["metadata"]["signature_def"]["signature_def"]
    assert sorted(signatures) == [
        "classify_x_to_y", "regress_x2_to_y3", "regress_x_to_y", "regress_x_to_y2",
        "serving_default",
    ]  # fmt: skip
    assert signatures["classify_x_to_y"] == {
        "inputs": {
            "inputs": {
                "dtype": "DT_STRING",
                "name": "tf_example:0",
                "tensor_shape": {"dim": [], "unknown_rank": True},
            }
        },
        "outputs": {
            "scores": {
                "dtype": "DT_FLOAT",
                "name": "y:0",
                "tensor_shape": {
                    "dim": [{"name": "", "size": "-1"}, {"name": "", "size": "1"}],
                    "unknown_rank": False,
                },
            }
        },
        "method_name": CLASSIFY,
        "defaults": {},
    }
    message = pb.GetModelMetadataRequest(
        model_spec=model_spec(MODEL), metadata_field=["signature_def"]
    )
    packed = ask("GetModelMetadata", message).metadata["signature_def"]
    found = pb.SignatureDefMap()
    assert packed.Unpack(found)
    assert set(found.signature_def) == set(signatures)


def test_the_state_of_a_model_is_tensorflow_servings_to_the_letter(rest: KeptConnection) -> None:
    ok = {"error_code": "OK", "error_message": ""}
    row = {"version": "123", "state": "AVAILABLE", "status": ok}
    assert rest.send("GET", f"/v1/models/{MODEL}").json == {"model_version_status": [row]}


def test_inputs_of_unknown_rank_take_every_rank(rest: KeptConnection) -> None:
    for values in (2.0, [2.0], [[1.0, 2.0]], [[[1.0]], [[2.0]]]):
        expected = (np.array(values) * 6).tolist()
        assert post(rest, "predict", {"inputs": values}, "ranks").json == {"outputs": expected}


def test_what_the_graph_refuses_is_a_bad_request_in_its_words(
    rest: KeptConnection, ask: Ask
) -> None:
    reply = post(rest, "predict", {"signature_name": "square", "inputs": [[1.0, 2.0]]}, "ranks")
    assert reply.status == 400
    assert "Matrix size-incompatible" in reply.json["error"]
    message = predict_request("ranks", {"x": np.float32([[1, 2]])}, signature="square")
    status, words = refused(ask, "Predict", message)
    assert status == "INVALID_ARGUMENT"
    assert "Matrix size-incompatible" in words


def test_cache_and_batcher_keep_signatures_apart(gateway: Gateway) -> None:
    factors = {
        "serving_default": lambda x: x + 1,
        "twice": lambda x: x * 2,
        "thrice": lambda x: x * 3,
    }
    jobs = [(name, float(number % 7)) for number in range(60) for name in factors]

    def once(job: tuple[str, float]) -> Any:
        name, value = job
        connection = KeptConnection(gateway.http)
        document = {"signature_name": name, "instances": [[value, 1.0]]}
        reply = post(connection, "predict", document, "shared").json
        connection.close()
        return reply

    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(once, jobs))
    expected = [{"predictions": [[factors[n](v), factors[n](1.0)]]} for n, v in jobs]
    assert replies == expected


def test_the_shapes_that_a_configuration_declares_bind_this_dialect_too(direct: Gateway) -> None:
    connection = KeptConnection(direct.http)
    reply = post(connection, "predict", {"instances": [1.0, 2.0]}, "declared")
    assert (reply.status, reply.json["error"][:16]) == (400, "unexpected shape")
    other = {"signature_name": "twice", "instances": [[1.0, 2.0]]}
    assert post(connection, "predict", other, "declared").json == {"predictions": [[2.0, 4.0]]}
    connection.close()


def test_other_dialects_see_the_default_signature_alone(direct: Gateway) -> None:
    connection = KeptConnection(direct.http)
    document = connection.send("GET", f"/v2/models/{MODEL}").json
    assert [(t["name"], t["shape"]) for t in document["inputs"]] == [("x", [-1, 1])]
    statistics = connection.send("GET", f"/v2/models/{MODEL}/stats").json["model_stats"][0]
    assert statistics["inference_count"] > 0
    connection.close()
