"""TorchServe's dialect: health, errors, gRPC, against what TorchServe 0.12 answers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.http
from google.protobuf import empty_pb2

from modelport.gateway.protocols.torchserve.grpc import INFERENCE_SERVICE, MANAGEMENT_SERVICE
from modelport.gateway.wire.proto import torchserve_inference_pb2 as inference
from modelport.gateway.wire.proto import torchserve_management_pb2 as management
from tests import models
from tests.conformance import wire
from tests.conformance.torchserve import (
    ROW,
    ask,
    call,
    error,
    rpc,
)
from tests.conformance.wire import HEADER_LENGTH
from tests.server import Gateway, serving

# -- health, description, request ids -------------------------------------------------------------


def test_ping_is_torchserves_byte_for_byte(served: Gateway) -> None:
    for method in ("GET", "POST"):
        reply = ask(served, method, "/ping")
        assert (reply.status, reply.body) == (200, b'{\n  "status": "Healthy"\n}\n')
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["cache-control"] == "no-cache; no-store, must-revalidate, private"


def test_ping_of_a_server_that_is_not_ready_is_unhealthy(tmp_path: Path) -> None:
    root = models.repository(tmp_path)
    (root / "broken" / "1").mkdir(parents=True)
    (root / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    with serving(root) as gateway:
        reply = ask(gateway, "GET", "/ping")
    assert (reply.status, reply.body) == (500, b'{\n  "status": "Unhealthy"\n}\n')


@pytest.mark.parametrize("path", ["/ping", "/models", "/predictions/x2", "/predictions/nope"])
def test_every_answer_carries_a_request_id_the_client_s_own_or_a_new_one(
    served: Gateway, path: str
) -> None:
    method = "POST" if path.startswith("/predictions") else "GET"
    first, second = (ask(served, method, path, ROW).headers["x-request-id"] for _ in range(2))
    assert uuid.UUID(first) != uuid.UUID(second)
    if "nope" not in path:
        reply = ask(served, method, path, ROW, X_Request_Id="mine")
        assert reply.headers["x-request-id"] == "mine"


def test_options_describes_the_api(served: Gateway) -> None:
    document = ask(served, "OPTIONS", "/").json
    assert document["openapi"].startswith("3.")
    assert {"/predictions/{model}", "/models", "/ping"} <= set(document["paths"])


NOT_FOUND = (
    404,
    "ResourceNotFoundException",
    "Requested resource is not found, please refer to API document.",
)
NOT_ALLOWED = (
    405,
    "MethodNotAllowedException",
    "Requested method is not allowed, please refer to API document.",
)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/predictions", NOT_FOUND),
        ("POST", "/predictions/", NOT_FOUND),
        ("POST", "/predictions/x2/1/more", NOT_FOUND),
        ("DELETE", "/ping", NOT_ALLOWED),
        ("PATCH", "/models/x2", NOT_ALLOWED),
        ("POST", "/predictions/nope", (404, "ModelNotFoundException", "Model not found: nope")),
        ("POST", "/predictions/nope/1", (404, "ModelNotFoundException", "Model not found: nope")),
        ("GET", "/models/nope", (404, "ModelNotFoundException", "Model not found: nope")),
        ("GET", "/models/nope/all", (404, "ModelNotFoundException", "Model not found: nope")),
        (
            "POST",
            "/predictions/x2/9",
            (404, "ModelVersionNotFoundException", "Model version: 9 does not exist for model: x2"),
        ),
        (
            "POST",
            "/predictions/x2/y",
            (404, "ModelVersionNotFoundException", "Model version: y does not exist for model: x2"),
        ),
        (
            "GET",
            "/models/x2/9",
            (404, "ModelVersionNotFoundException", "Model version: 9 does not exist for model: x2"),
        ),
        (
            "PUT",
            "/models/x2?min_worker=2&max_worker=1",
            (400, "BadRequestException", "max_worker cannot be less than min_worker."),
        ),
    ],
)
def test_errors_are_torchserves(
    served: Gateway, method: str, path: str, expected: tuple[int, str, str]
) -> None:
    assert error(ask(served, method, path, b"x")) == expected


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "..%2f..", "a%00b", "%5c", "x" * 300, "%ff", "x2%2f1"]
)
def test_names_reach_no_path(served: Gateway, name: str) -> None:
    for method, path in (("POST", f"/predictions/{name}"), ("GET", f"/models/{name}")):
        reply = ask(served, method, path, ROW)
        assert error(reply)[0] == 404


# -- gRPC -----------------------------------------------------------------------------------------


def manage(gateway: Gateway, method: str, message: Any) -> str:
    reply = rpc(gateway, MANAGEMENT_SERVICE, method, message, management.ManagementResponse)
    return str(reply.msg)


def refused(gateway: Gateway, method: str, message: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        manage(gateway, method, message)
    return caught.value.code().name, caught.value.details()


def test_ping_over_grpc(served: Gateway) -> None:
    reply = rpc(
        served, INFERENCE_SERVICE, "Ping", empty_pb2.Empty(), inference.TorchServeHealthResponse
    )
    assert reply.health == '{\n  "status": "Healthy"\n}'


@pytest.mark.parametrize(
    ("model", "version", "status", "message"),
    [
        ("nope", "", "INTERNAL", "Model not found: nope"),
        ("x2", "9", "INTERNAL", "Model version: 9 does not exist for model: x2"),
        ("", "", "INVALID_ARGUMENT", "Parameter model_name is required."),
    ],
)
def test_statuses_of_predictions_are_torchserves(
    served: Gateway, model: str, version: str, status: str, message: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(served, "Predictions", model, ROW, version)
    assert (caught.value.code().name, caught.value.details()) == (status, message)


def test_an_input_without_data_is_refused(served: Gateway) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(served, "Predictions", "x2", ROW, key="other")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_streams(served: Gateway) -> None:
    good = inference.PredictionsRequest(model_name="x2", sequence_id="s")
    good.input["data"] = b"[1, 2, 3, 4]"
    bad = inference.PredictionsRequest(model_name="nope", sequence_id="t")
    bad.input["data"] = b"[]"
    raw = [message.SerializeToString() for message in (good, bad, good)]
    with wire.channel(served.grpc) as channel:
        stream = channel.unary_stream(f"/{INFERENCE_SERVICE}/StreamPredictions")
        (one,) = list(stream(raw[0], timeout=30))
        both = channel.stream_stream(f"/{INFERENCE_SERVICE}/StreamPredictions2")
        answers = list(both(iter(raw), timeout=30))
    assert inference.PredictionResponse.FromString(one).prediction == b"[2.0,4.0,6.0,8.0]"
    first, second, third = map(inference.PredictionResponse.FromString, answers)
    assert first.prediction == third.prediction == b"[2.0,4.0,6.0,8.0]"
    assert (first.sequence_id, second.sequence_id) == ("s", "t")
    assert (second.status.code, second.status.message) == (13, "Model not found: nope")


def test_management_over_grpc_says_what_rest_says(served: Gateway, explicit: Gateway) -> None:
    listed = json.loads(manage(served, "ListModels", management.ListModelsRequest(limit=2)))
    assert listed == ask(served, "GET", "/models?limit=2").json
    described = manage(served, "DescribeModel", management.DescribeModelRequest(model_name="x2"))
    assert json.loads(described) == ask(served, "GET", "/models/x2").json
    unknown = management.DescribeModelRequest(model_name="nope")
    assert refused(served, "DescribeModel", unknown) == ("NOT_FOUND", "Model not found: nope")
    one = management.ScaleWorkerRequest(model_name="x2", synchronous=True)
    assert manage(served, "ScaleWorker", one) == "Workers scaled to 1 for model: x2"
    other = management.ScaleWorkerRequest(model_name="x2", min_worker=2)
    assert refused(served, "ScaleWorker", other)[0] == "PERMISSION_DENIED"
    register = management.RegisterModelRequest(url="three.mar")
    assert refused(served, "RegisterModel", register)[0] == "PERMISSION_DENIED"
    assert manage(explicit, "RegisterModel", register).startswith('Model "three" Version: 2 regis')
    assert refused(explicit, "RegisterModel", register)[0] == "ABORTED"
    default = management.SetDefaultRequest(model_name="three", model_version="1")
    assert manage(explicit, "SetDefault", default).startswith("Default version successfully")
    remote = management.RegisterModelRequest(url="https://example.com/x.mar")
    assert refused(explicit, "RegisterModel", remote)[0] == "NOT_FOUND"
    gone = management.UnregisterModelRequest(model_name="three", model_version="2")
    assert manage(explicit, "UnregisterModel", gone) == 'Model "three" unregistered'


def test_tritonclient_parses_the_answers_of_predictions(served: Gateway) -> None:
    client = tritonclient.http.InferenceServerClient
    tensor = tritonclient.http.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.arange(4, dtype=np.float32)[np.newaxis])
    body, length = client.generate_request_body([tensor])
    headers: Mapping[str, str] = {HEADER_LENGTH: str(length)}
    reply = wire.send(served.http, "POST", "/predictions/x2", bytes(body), headers)
    size = reply.headers.get(HEADER_LENGTH.lower())
    result = client.parse_response_body(reply.body, header_length=size and int(size))
    assert result.as_numpy("y").tolist() == [[0, 2, 4, 6]]


def test_the_way_to_predict_with_a_model_is_described(served: Gateway) -> None:
    for path, key in (("x2", "{model}"), ("two_versions/2", "{model}/{version}")):
        reply = ask(served, "OPTIONS", f"/predictions/{path}")
        assert reply.status == 200
        assert list(reply.json["paths"]) == [f"/predictions/{key}"]
    reply = ask(served, "OPTIONS", "/predictions/nobody")
    assert error(reply) == (404, "ModelNotFoundException", "Model not found: nobody")
