"""TensorFlow Serving's control of the manager, labels, and pictures, over gRPC and REST."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelport.gateway.wire.proto import serving_pb2 as pb
from tests import models
from tests.conformance.repository import add
from tests.conformance.test_tfserving_grpc import (
    ROW,
    Ask,
    asking,
    model_spec,
    output,
    predict_request,
    refused,
)
from tests.conformance.wire import KeptConnection, send
from tests.polling import eventually
from tests.server import Gateway, serving


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tfserving") / "models"


@pytest.fixture(scope="module")
def controlled(root: Path) -> Iterator[Gateway]:
    for version in (1, 2, 3):
        models.multiply(root / "m" / str(version) / "model.onnx", float(version))
    label = 'parameters { key: "version_label.stable" value { string_value: "1" } }'
    text = models.config(
        "m", ["x FP32 4"], ["y FP32 4"], extra="version_policy { all {} } " + label
    )
    add(root, "m", text)
    models.multiply(add(root, "other", models.config("other", ["x FP32 4"], ["y FP32 4"])))
    picture = models.config("picture", ["x FP32 3,2,2"], ["y FP32 3,2,2"], extra=models.PICTURES)
    models.identity(add(root, "picture", picture), "FP32", ("batch", 3, 2, 2))
    flags = ("--model-control-mode", "explicit", "--load-model", "*")
    (root / "broken" / "1").mkdir(parents=True)
    (root / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    with serving(root, *flags, "--exit-on-error", "false") as served:
        yield served


@pytest.fixture
def control(controlled: Gateway) -> Iterator[Ask]:
    with asking(controlled.grpc) as opened:
        yield opened
        opened("HandleReloadConfigRequest", reload("m", "other", "picture"))


def reload(*names: str) -> pb.ReloadConfigRequest:
    message = pb.ReloadConfigRequest()
    message.config.model_config_list.SetInParent()
    for name in names:
        message.config.model_config_list.config.add(name=name)
    return message


def factor(ask: Ask, **spec: Any) -> float:
    reply = ask("Predict", predict_request("m", {"x": ROW}, **spec))
    return float(output(reply, "y")[0, 0])


def state_of(ask: Ask, version: int) -> int:
    status = ask("GetModelStatus", pb.GetModelStatusRequest(model_spec=model_spec("m")))
    return int({row.version: row.state for row in status.model_version_status}[version])


def test_a_label_names_a_version_over_grpc_and_rest(control: Ask, controlled: Gateway) -> None:
    assert (factor(control), factor(control, label="stable")) == (3.0, 1.0)
    path = "/v1/models/m/labels/stable"
    reply = send(controlled.http, "POST", f"{path}:predict", b'{"instances": [[1,1,1,1]]}')
    assert reply.json == {"predictions": [[1.0] * 4]}
    rows = send(controlled.http, "GET", path).json["model_version_status"]
    assert [row["version"] for row in rows] == ["1"]


def test_a_reload_serves_what_it_lists_and_nothing_else(control: Ask) -> None:
    message = reload("m")
    config = message.config.model_config_list.config[0]
    config.base_path = "/models/m/"
    config.model_version_policy.specific.versions.extend([1, 2])
    config.version_labels["canary"] = 2
    message.metric_names.append("/some/metric")
    reply = control("HandleReloadConfigRequest", message)
    assert (reply.status.error_code, reply.metric[0].name) == (0, "/some/metric")
    assert (factor(control), factor(control, label="canary")) == (2.0, 2.0)
    # A reload waits for what it loads, as TensorFlow Serving's does, not for what it unloads.
    eventually(lambda: state_of(control, 3) == pb.ModelVersionStatus.END)
    code, _ = refused(control, "Predict", predict_request("other", {"x": ROW}))
    assert code in ("NOT_FOUND", "UNAVAILABLE")


@pytest.mark.parametrize(
    ("path", "names", "status"),
    [
        ("/etc", ["m"], "INVALID_ARGUMENT"),
        ("/models/m/..", ["m"], "INVALID_ARGUMENT"),
        ("", ["m", "m"], "INVALID_ARGUMENT"),
        ("", ["nobody"], "NOT_FOUND"),
    ],
)
def test_a_reload_that_cannot_be_changes_nothing(
    control: Ask, path: str, names: list[str], status: str
) -> None:
    message = reload(*names)
    message.config.model_config_list.config[0].base_path = path
    assert refused(control, "HandleReloadConfigRequest", message)[0] == status
    assert (factor(control), factor(control, label="stable")) == (3.0, 1.0)
    code, _ = refused(control, "HandleReloadConfigRequest", pb.ReloadConfigRequest())
    assert code == "INVALID_ARGUMENT"


def test_reloads_fail_no_request_of_any_form(control: Ask, controlled: Gateway, root: Path) -> None:
    """Pictures are decoded in a thread, and a reload may come between that and the model."""
    stop = threading.Event()
    white = np.ones((1, 3, 2, 2), np.float32)
    bodies = [b'{"instances": [{"b64": "%s"}]}' % base64.b64encode(picture())]
    bodies.append(json.dumps({"inputs": white.tolist()}).encode())

    def rest(body: bytes) -> set[int]:
        found = set()
        with contextlib.closing(KeptConnection(controlled.http)) as connection:
            while not stop.is_set():
                found.add(connection.send("POST", "/v1/models/picture:predict", body).status)
        return found

    def over_grpc() -> set[int]:
        with asking(controlled.grpc) as ask:
            while not stop.is_set():
                ask("Predict", predict_request("picture", {"x": white}))
        return {200}

    with ThreadPoolExecutor(5) as pool:
        running = [pool.submit(rest, body) for body in bodies * 2] + [pool.submit(over_grpc)]
        try:
            for version in range(2, 10):
                path = root / "picture" / str(version) / "model.onnx"
                models.identity(path, "FP32", ("batch", 3, 2, 2))
                control("HandleReloadConfigRequest", reload("m", "other", "picture"))
        finally:
            stop.set()
        assert [future.result() for future in running] == [{200}] * 5
    assert (
        control("Predict", predict_request("picture", {"x": white})).model_spec.version.value == 9
    )


def test_a_reload_needs_the_explicit_mode(gateway: Gateway) -> None:
    with asking(gateway.grpc) as ask:
        code, text = refused(ask, "HandleReloadConfigRequest", reload("x2"))
        assert (code, "--model-control-mode=explicit" in text) == ("UNAVAILABLE", True)
        assert ask("Predict", predict_request("x3", {"x": ROW}))


def test_a_version_that_did_not_load_is_listed_with_the_reason(
    control: Ask, controlled: Gateway
) -> None:
    assert send(controlled.http, "POST", "/v2/repository/models/broken/load").status == 400
    rows = send(controlled.http, "GET", "/v1/models/broken").json["model_version_status"]
    assert (rows[0]["state"], rows[0]["status"]["error_code"]) == ("END", "UNAVAILABLE")
    assert rows[0]["status"]["error_message"]
    reply = send(controlled.http, "POST", "/v1/models/broken:predict", b'{"instances": [1]}')
    assert (reply.status, "retry-after" in reply.headers) == (404, False)


def picture() -> bytes:
    """A white PNG of two by two."""
    file = io.BytesIO()
    Image.fromarray(np.full((2, 2, 3), 255, np.uint8)).save(file, "PNG")
    return file.getvalue()


def test_pictures_come_as_base64_as_strings_and_as_features(
    control: Ask, controlled: Gateway
) -> None:
    encoded = base64.b64encode(picture()).decode()
    white = np.ones((1, 3, 2, 2)).tolist()
    body = json.dumps({"instances": [{"b64": encoded}]}).encode()
    reply = send(controlled.http, "POST", "/v1/models/picture:predict", body)
    assert reply.json == {"predictions": white}
    body = json.dumps({"instances": [{"x": {"b64": encoded}}] * 2}).encode()
    reply = send(controlled.http, "POST", "/v1/models/picture:predict", body)
    assert reply.json == {"predictions": white * 2}
    body = json.dumps({"instances": [{"b64": encoded}] * 9}).encode()
    reply = send(controlled.http, "POST", "/v1/models/picture:predict", body)
    assert (reply.status, "at most 8 images" in reply.json["error"]) == (400, True)
    strings = np.array([picture()], object)
    reply = control("Predict", predict_request("picture", {"x": strings}))
    assert output(reply, "y").tolist() == white
    strings[0] = b"no picture"
    code, _ = refused(control, "Predict", predict_request("picture", {"x": strings}))
    assert code == "INVALID_ARGUMENT"
