"""Loading and unloading on request, by all four clients (``--model-control-mode explicit``)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests import models
from tests.conformance import wire
from tests.conformance.clients import CALLERS, CONTROLS, Ask, ControlCaller, status
from tests.server import Gateway, serving

ROW = np.array([[1, 2, 3, 4]], np.float32)


@dataclass(frozen=True)
class Explicit:
    gateway: Gateway
    repository: Path


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explicit]:
    root = models.repository(tmp_path_factory.mktemp("explicit"))
    broken = root / "broken" / "1" / "model.onnx"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"this is no model")
    flags = ("--model-control-mode", "explicit")
    with serving(root, *flags) as gateway:
        yield Explicit(gateway, root)


@pytest.fixture(params=CONTROLS)
def control(
    request: pytest.FixtureRequest, explicit: Explicit, runner: asyncio.Runner
) -> Iterator[ControlCaller]:
    """A client; whatever it loaded is unloaded afterwards, and the repository is as it was."""
    made = ControlCaller(CALLERS[request.param](explicit.gateway, runner), runner)
    yield made
    shutil.rmtree(explicit.repository / "x2")
    models.repository(explicit.repository)
    made("unload_model", "x2")
    made.close()


def index(control: ControlCaller) -> dict[tuple[str, str], dict[str, Any]]:
    document = control("get_model_repository_index")
    rows = document.get("models", []) if control.transport == "grpc" else document
    return {(row["name"], row.get("version", "")): row for row in rows}


def answer(explicit: Explicit) -> list[float]:
    reply = wire.send(explicit.gateway.http, "POST", "/v2/models/x2/infer", wire.good_body())
    assert reply.status == 200, reply.body
    values: list[float] = reply.json["outputs"][0]["data"]
    return values


def test_a_model_serves_after_load_and_not_after_unload(
    control: ControlCaller, explicit: Explicit
) -> None:
    control("load_model", "x2")
    assert control("is_model_ready", "x2") is True
    assert index(control)["x2", "1"]["state"] == "READY"
    assert answer(explicit) == [2, 4, 6, 8]
    control("unload_model", "x2")
    assert control("is_model_ready", "x2") is False
    row = index(control)["x2", "1"]
    assert (row["state"], row["reason"]) == ("UNAVAILABLE", "unloaded")
    reply = wire.send(explicit.gateway.http, "POST", "/v2/models/x2/infer", wire.good_body())
    wire.assert_error(reply, 404)


def test_unloading_twice_is_no_error(control: ControlCaller) -> None:
    control("load_model", "x2")
    control("unload_model", "x2")
    control("unload_model", "x2")
    assert control("is_model_ready", "x2") is False


def test_loading_twice_is_no_error_and_changes_nothing(
    control: ControlCaller, explicit: Explicit
) -> None:
    control("load_model", "x2")
    control("load_model", "x2")
    assert answer(explicit) == [2, 4, 6, 8]


def test_an_unknown_model_cannot_be_loaded(control: ControlCaller) -> None:
    error = control.refusal("load_model", "nobody")
    assert error.status() == status(control.transport, 404, "NOT_FOUND")
    assert error.message() == "failed to load 'nobody', failed to poll from model repository"


def test_an_unknown_model_is_unloaded_already(control: ControlCaller) -> None:
    control("unload_model", "nobody")
    control("unload_model", "nobody", unload_dependents=True)


def test_a_refused_override_failed_to_load(control: ControlCaller) -> None:
    error = control.refusal("load_model", "x2", config='"parameters": {"config": {{}}}')
    assert error.status() == status(control.transport, 400, "INVALID_ARGUMENT")
    assert error.message().startswith("failed to load 'x2', invalid config override: ")
    assert control("is_model_ready", "x2") is False


def test_a_file_of_a_request_that_cannot_be_is_refused_as_triton_does(
    control: ControlCaller,
) -> None:
    error = control.refusal("load_model", "x2", config="{}", files={"file:" + "A" * 256: b"a"})
    assert error.status() == status(control.transport, 500, "INTERNAL")
    assert error.message() == "failed to load 'x2', failed to poll from model repository"


@pytest.mark.parametrize("name", [" ", "\t", " \n "])
def test_a_name_of_spaces_is_empty(control: ControlCaller, name: str) -> None:
    if control.transport == "http":
        name = " "  # its paths hold no other
    error = control.refusal("load_model", name)
    assert error.message() == ("Model name cannot be empty. Please enter a valid name to deploy.")


@pytest.mark.parametrize("name", ["../x2", "a/../b", "..", "x2/1", "%2e%2e", "a" * 300])
def test_a_name_that_is_a_path_loads_nothing(control: ControlCaller, name: str) -> None:
    error = control.refusal("load_model", name)
    if control.transport == "http":  # a path of such a name may be another route's, or none's
        assert error.status() in ("400", "404")
    elif name in ("%2e%2e", "a" * 300):
        assert error.status() == "StatusCode.NOT_FOUND"
    else:
        assert error.status() == status(control.transport, 400, "INVALID_ARGUMENT")
        assert error.message() == "model name must not contain path traversal characters"
    wire.assert_public(error.message() or "", name)
    assert control("is_model_ready", "x2") is False


def test_a_model_that_does_not_load_says_why(control: ControlCaller, explicit: Explicit) -> None:
    error = control.refusal("load_model", "broken")
    assert error.status() == status(control.transport, 400, "INVALID_ARGUMENT")
    assert error.message().startswith("load failed for model 'broken': version 1 is at UNAVAILABLE")
    wire.assert_public(error.message())
    row = index(control)["broken", "1"]
    assert row["state"] == "UNAVAILABLE"
    assert "model.onnx" in row["reason"]
    wire.assert_public(row["reason"])
    assert control("is_server_live") is True
    assert control("is_model_ready", "broken") is False
    reply = wire.send(explicit.gateway.http, "POST", "/v2/models/broken/infer", wire.good_body())
    wire.assert_error(reply, 404)


def test_a_new_version_serves_after_a_load(control: ControlCaller, explicit: Explicit) -> None:
    control("load_model", "x2")
    models.multiply(explicit.repository / "x2" / "2" / "model.onnx", factor=5.0)
    assert answer(explicit) == [2, 4, 6, 8]
    control("load_model", "x2")
    assert answer(explicit) == [5, 10, 15, 20]
    assert control("get_model_metadata", "x2")["versions"] == ["2"]


def test_a_reload_that_fails_leaves_what_serves(control: ControlCaller, explicit: Explicit) -> None:
    control("load_model", "x2")
    (explicit.repository / "x2" / "1" / "model.onnx").write_bytes(b"damaged")
    error = control.refusal("load_model", "x2")
    assert error.status() == status(control.transport, 400, "INVALID_ARGUMENT")
    assert answer(explicit) == [2, 4, 6, 8]
    assert control("is_model_ready", "x2", "1") is True
    assert index(control)["x2", "1"]["state"] == "READY"


def test_a_configuration_may_come_with_the_load(control: ControlCaller, explicit: Explicit) -> None:
    given = {
        "backend": "onnxruntime",
        "max_batch_size": 2,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [4]}],
    }
    control("load_model", "x2", config=json.dumps(given))
    found = control("get_model_config", "x2")
    found = found["config"] if control.transport == "grpc" else found
    assert found["max_batch_size"] == 2
    caller = CALLERS["grpc"](explicit.gateway, asyncio.Runner())
    try:
        error = caller.refusal(Ask("x2", [("x", np.zeros((3, 4), np.float32))]))
        assert error.message() == "inference request batch-size must be <= 2 for 'x2'"
    finally:
        caller.close()
    for config in ('{"max_batch_size": -1}', None):  # it stays, as in Triton
        with contextlib.suppress(InferenceServerException):
            control("load_model", "x2", config=config)
        found = control("get_model_config", "x2")
        assert (found["config"] if control.transport == "grpc" else found)["max_batch_size"] == 2
    control("unload_model", "x2")
    control("load_model", "x2")
    found = control("get_model_config", "x2")
    assert (found["config"] if control.transport == "grpc" else found)["max_batch_size"] == 8


@pytest.mark.parametrize(
    "config", ["no json", "[]", '{"max_batch_size": "many"}', '{"nobody": 1}', '{"input": 1}', "["]
)
def test_an_invalid_configuration_is_refused(control: ControlCaller, config: str) -> None:
    error = control.refusal("load_model", "x2", config=config)
    assert error.status() == status(control.transport, 400, "INVALID_ARGUMENT")
    wire.assert_public(error.message())
    assert control("is_model_ready", "x2") is False


def test_a_model_never_loaded_is_in_the_index_by_its_name_alone(
    tmp_path: Path, runner: asyncio.Runner
) -> None:
    root = models.repository(tmp_path)
    with serving(root, "--model-control-mode", "explicit") as gateway:
        reply = wire.send(gateway.http, "POST", "/v2/repository/index")
        assert reply.json == [{"name": "x2"}]
        ready = wire.send(gateway.http, "POST", "/v2/repository/index", b'{"ready": true}')
        assert ready.json == []
        assert wire.send(gateway.http, "GET", "/v2/health/ready").status == 200


def test_load_model_at_the_start_loads_those_and_no_others(tmp_path: Path) -> None:
    root = models.repository(tmp_path)
    models.multiply(root / "other" / "1" / "model.onnx")
    flags = ("--model-control-mode", "explicit", "--load-model", "x2")
    with serving(root, *flags) as gateway:
        rows = wire.send(gateway.http, "POST", "/v2/repository/index").json
        assert [(row["name"], row.get("state")) for row in rows] == [
            ("other", None),
            ("x2", "READY"),
        ]
