"""The cases of tensorflow/serving's ``http_rest_api_handler_test.cc``, restated over the wire."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import half_plus_two
from tests.conformance.wire import KeptConnection, WireReply
from tests.server import serving

MODEL = "/v1/models/saved_model_half_plus_two_2_versions"
LABEL = f"{MODEL}/labels/label_1"
VERSION = f"{MODEL}/versions/123"
CONFIG = """
backend: "tensorflow" default_model_filename: "model.savedmodel"
parameters { key: "version_label.label_1" value { string_value: "123" } }
"""


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptConnection]:
    root: Path = tmp_path_factory.mktemp("handler") / "models"
    model = root / MODEL.rpartition("/")[2]
    half_plus_two.save(model / "123" / "model.savedmodel")
    (model / "config.pbtxt").write_text(CONFIG)
    with serving(root) as gateway:
        connection = KeptConnection(gateway.http)
        yield connection
        connection.close()


def ask(rest: KeptConnection, method: str, path: str, body: str = "") -> WireReply:
    return rest.send(method, path, body.encode())


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("GET", "/v1/models/debug/model_name", "Malformed request"),
        ("POST", "/v1/models", "Malformed request"),
        ("GET", "/v1/models/foo:predict", "Malformed request"),
        ("GET", "/v1/models/foo/version/50:predict", "Malformed request"),
        ("POST", "/v1/models/foo/version/50:regress", "Malformed request"),
        ("POST", "/v1/models/foo/versions/HELLO:regress", "Malformed request"),
        ("POST", f"/v1/models/foo/versions/{2**64 - 1}:regress", "Failed to convert version"),
        ("POST", "/v1/models/foo/metadata", "Malformed request"),
        ("POST", "/v1/models/foo/label/some_label:regress", "Malformed request"),
        ("POST", "/v1/models/foo/versions/50/labels/some_label:regress", "Malformed request"),
        ("POST", "/v1/models/foo/versions/some_label:regress", "Malformed request"),
    ],
)
def test_unsupported_api_calls(rest: KeptConnection, method: str, path: str, message: str) -> None:
    """``GET /v1/models`` is not among them: it is KServe's list of models here."""
    reply = ask(rest, method, path)
    assert reply.status == 400
    assert message in reply.json["error"]


@pytest.mark.parametrize(
    "path", ["/v1/models/foo:predict", "/v1/models/foo/versions/50:predict", f"{MODEL}99:predict"]
)
def test_predict_model_name_version_errors(rest: KeptConnection, path: str) -> None:
    assert ask(rest, "POST", path, '{ "instances": [1] }').status == 404


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (MODEL, "", "JSON Parse error: The document is empty"),
        (MODEL, "instances = [1, 2]", "JSON Parse error: "),
        (MODEL, '{ "instances": ["x", "y"] }', "not of expected type: float"),
        (
            f"{MODEL}/labels/nope",
            '{ "instances": ["x", "y"] }',
            "Unrecognized servable version label",
        ),
        (MODEL, '{ "signature_name": 100 }', "'signature_name' key must be a string value."),
    ],
)
def test_predict_request_errors(rest: KeptConnection, path: str, body: str, message: str) -> None:
    reply = ask(rest, "POST", f"{path}:predict", body)
    assert reply.status == 400
    assert message in reply.json["error"]


def test_predict(rest: KeptConnection) -> None:
    explicit = '{"signature_name": "serving_default", '
    for path, body, expected in (
        (MODEL, '{"instances": [[1, 2], [3, 4]]}', {"predictions": [[2.5, 3.0], [3.5, 4.0]]}),
        (VERSION, '{"instances": [1.0, 2.0]}', {"predictions": [2.5, 3.0]}),
        (LABEL, '{"instances": [1.0, 2.0]}', {"predictions": [2.5, 3.0]}),
        (VERSION, explicit + '"instances": [3.0, 4.0]}', {"predictions": [3.5, 4.0]}),
        (VERSION, explicit + '"inputs": [3.0, 4.0]}', {"outputs": [3.5, 4.0]}),
    ):
        reply = ask(rest, "POST", f"{path}:predict", body)
        assert reply.json == expected
        assert reply.headers["content-type"] == "application/json"


def test_regress_and_classify(rest: KeptConnection) -> None:
    for path in (MODEL, VERSION, LABEL):
        body = {"signature_name": "regress_x_to_y", "examples": [{"x": 80.0}]}
        assert ask(rest, "POST", f"{path}:regress", json.dumps(body)).json == {"results": [42]}
        body = {"signature_name": "classify_x_to_y", "examples": [{"x": 20.0}]}
        expected = {"results": [[["", 12]]]}
        assert ask(rest, "POST", f"{path}:classify", json.dumps(body)).json == expected


def test_get_status_and_metadata(rest: KeptConnection) -> None:
    status = {"error_code": "OK", "error_message": ""}
    expected = {
        "model_version_status": [{"version": "123", "state": "AVAILABLE", "status": status}]
    }
    for path in (MODEL, VERSION, LABEL):
        assert ask(rest, "GET", path).json == expected
        document = ask(rest, "GET", f"{path}/metadata").json
        assert document["model_spec"]["version"] == "123"
        assert len(document["metadata"]["signature_def"]["signature_def"]) == 5
