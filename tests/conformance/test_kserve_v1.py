"""KServe's v1 protocol beside TensorFlow Serving's, on the paths that both have; explainers.

The requests are those of KServe's own client (``InferenceRESTClient`` of kserve/kserve) and of
TorchServe's handlers for KServe.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.server.admin.metrics_port import prometheus_path
from tests import models
from tests.conformance.repository import add
from tests.conformance.torchserve import error, predict
from tests.conformance.wire import TRANSPORTS, KeptConnection, WireReply
from tests.server import Gateway, serving

MONITORING = 'prometheus_config: { enable: true, path: "/monitoring/prometheus/metrics" }'
EXPLAINER = 'parameters { key: "explainer" value { string_value: "reasons" } }'
PICTURE = 'parameters { key: "image.size" value { string_value: "2" } }'


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("kserve")
    root = folder / "models"
    text = models.config("x2", ["x FP32 4"], ["y FP32 4"], extra=EXPLAINER)
    models.multiply(add(root, "x2", text))
    text = models.config("reasons", ["x FP32 4"], ["y FP32 4"])
    models.multiply(add(root, "reasons", text), factor=10.0)
    text = models.config("picture", ["x FP32 3,2,2"], ["y FP32 3,2,2"], extra=PICTURE)
    models.identity(add(root, "picture", text), "FP32", ("batch", 3, 2, 2))
    models.fake(root, "broken", "FP32", "4")
    (root / "broken" / "config.pbtxt").write_text('backend: "nonsense"')
    monitoring = folder / "monitoring.txt"
    monitoring.write_text(MONITORING)
    with serving(root, "--monitoring-config-file", str(monitoring), "--workers", "2") as served:
        yield served


@pytest.fixture(params=TRANSPORTS)
def rest(gateway: Gateway, request: pytest.FixtureRequest) -> Iterator[KeptConnection]:
    connection = TRANSPORTS[request.param](gateway.http)
    yield connection
    connection.close()


def post(rest: KeptConnection, path: str, document: Any) -> WireReply:
    headers = {"content-type": "application/json", "accept": "*/*"}
    return rest.send("POST", path, json.dumps(document).encode(), headers)


def test_the_server_and_its_models_tell_how_they_are(rest: KeptConnection) -> None:
    assert rest.send("GET", "/").json == {"status": "alive"}
    assert rest.send("GET", "/v1/models").json == {"models": ["picture", "reasons", "x2"]}
    state = rest.send("GET", "/v1/models/x2").json
    assert (state["name"], state["ready"]) == ("x2", True)
    assert state["model_version_status"][0]["state"] == "AVAILABLE"
    assert rest.send("GET", "/v1/models/nope").status == 404
    assert "ready" not in rest.send("GET", "/v1/models/x2/versions/1").json


def test_instances_are_predicted_and_explained(rest: KeptConnection) -> None:
    rows = {"instances": [[1, 2, 3, 4], [0, 0, 0, 1]]}
    predicted = post(rest, "/v1/models/x2:predict", rows)
    assert predicted.headers["content-type"] == "application/json"
    assert predicted.json == {"predictions": [[2, 4, 6, 8], [0, 0, 0, 2]]}
    explained = post(rest, "/v1/models/x2:explain", rows).json
    assert explained == {"explanations": [[10, 20, 30, 40], [0, 0, 0, 10]]}
    refused = post(rest, "/v1/models/reasons:explain", rows)
    assert refused.status == 501
    assert "name one in the parameter 'explainer'" in refused.json["error"]
    assert post(rest, "/v1/models/nope:explain", rows).status == 404


def test_rows_may_come_in_torchserves_envelopes(rest: KeptConnection) -> None:
    rows = {"instances": [{"data": [1, 2, 3, 4], "target": 0}, {"data": [0, 0, 0, 1]}]}
    predicted = post(rest, "/v1/models/x2:predict", rows).json
    assert predicted == {"predictions": [[2, 4, 6, 8], [0, 0, 0, 2]]}
    stream = io.BytesIO()
    Image.new("RGB", (2, 2), (255, 0, 0)).save(stream, "PNG")
    png = base64.b64encode(stream.getvalue()).decode()
    named = post(rest, "/v1/models/picture:predict", {"instances": [{"data": png, "target": 0}]})
    plain = post(rest, "/v1/models/picture:predict", {"instances": [{"b64": png}]})
    assert named.json == plain.json
    assert len(named.json["predictions"][0]) == 3


def test_torchserve_explains_too(gateway: Gateway, rest: KeptConnection) -> None:
    row = b"[1, 2, 3, 4]"
    for path in ("/explanations/x2", "/explanations/x2/1"):
        assert rest.send("POST", path, row).json == predict(gateway, "reasons", row).json
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    reply = post(rest, "/v2/models/x2/explain", {"inputs": [tensor]}).json
    assert reply["outputs"][0]["data"] == [10, 20, 30, 40]
    assert post(rest, "/v2/models/reasons/explain", {"inputs": [tensor]}).status == 501
    for path, status in (("/explanations/reasons", 501), ("/explanations/nope", 404)):
        assert error(rest.send("POST", path, row))[0] == status


def test_metrics_are_on_the_rest_port_where_the_monitoring_configuration_says_so(
    gateway: Gateway, rest: KeptConnection
) -> None:
    reply = rest.send("GET", "/monitoring/prometheus/metrics")
    assert reply.status == 200
    assert b"# TYPE :tensorflow:serving:request_count counter" in reply.body
    assert rest.send("GET", "/metrics").status == 404


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("improperly formatted file", "is not a tensorflow.serving.MonitoringConfig"),
        ('prometheus_config { enable: true path: "m" }', "the path 'm' must begin with '/'"),
    ],
)
def test_a_wrong_monitoring_configuration_is_one_line(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "monitoring.txt"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=re.escape(message)) as caught:
        prometheus_path(file)
    assert "\n" not in str(caught.value)
    file.write_text("prometheus_config { enable: true }")
    assert prometheus_path(file) == "/monitoring/prometheus/metrics"
    file.write_text("")
    assert prometheus_path(file) == ""
