"""``--disable-auto-complete-config``: a model without a whole configuration is not served."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import models
from tests.conformance import wire
from tests.gateway.backends.python import python_models
from tests.server import Gateway, serving

COMPLETES = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(64)
        return config
    def execute(self, requests):
        x = [pb_utils.get_input_tensor_by_name(r, "x").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each)]) for each in x]
"""
FLAGS = (
    ("--disable-auto-complete-config",),
    pytest.param(("--strict-model-config", "true"), marks=pytest.mark.thorough),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = models.repository(tmp_path_factory.mktemp("strict"))
    for name in ("bare", "outputs", "inputs"):
        shutil.copytree(root / "x2" / "1", root / name / "1")
    tensors = {"input": "x", "output": "y"}
    for name, kind in (("outputs", "output"), ("inputs", "input")):
        (root / name / "config.pbtxt").write_text(
            'backend: "onnxruntime" max_batch_size: 8 '
            f'{kind} {{ name: "{tensors[kind]}" data_type: TYPE_FP32 dims: 4 }}'
        )
    both = 'input { name: "x" data_type: TYPE_FP32 dims: 4 } output { name: "y" '
    both += "data_type: TYPE_FP32 dims: 4 } max_batch_size: 8"
    for name, config in (("code", both), ("code_only", "")):
        python_models.model(root, name, COMPLETES, config)
    (root / "code_only" / "config.pbtxt").unlink()
    return root


@pytest.fixture(scope="module", params=FLAGS, ids=["flag", "alias"])
def gateway(root: Path, request: pytest.FixtureRequest) -> Iterator[Gateway]:
    flags = ("--allow-python", "--model-control-mode", "explicit", "--load-model", "*")
    with serving(root, *flags, *request.param) as gateway:
        yield gateway


def test_a_model_without_a_configuration_is_none(gateway: Gateway) -> None:
    index = {
        row["name"]: row for row in wire.send(gateway.http, "POST", "/v2/repository/index").json
    }
    for name in ("bare", "code_only"):
        reply = wire.send(gateway.http, "GET", f"/v2/models/{name}/versions/1")
        assert reply.json["error"] == f"Request for unknown model: '{name}' is not found"
        reply = wire.send(gateway.http, "POST", f"/v2/repository/models/{name}/load")
        assert "it has no config.pbtxt, and --disable-auto-complete-config" in reply.json["error"]
        assert "no config.pbtxt" in index[name]["reason"]


@pytest.mark.parametrize(("model", "missing"), [("outputs", "input"), ("inputs", "output")])
def test_a_configuration_that_lacks_tensors_is_not_completed(
    gateway: Gateway, model: str, missing: str
) -> None:
    reply = wire.send(gateway.http, "POST", f"/v2/repository/models/{model}/load")
    assert f"model '{model}' must specify '{missing}' in its configuration" in reply.json["error"]


def test_a_complete_one_is_served_and_python_does_not_complete_it(gateway: Gateway) -> None:
    for name, factor in (("x2", 2), ("code", 1)):
        reply = wire.send(gateway.http, "POST", wire.infer_path(name), wire.good_body())
        assert reply.json["outputs"][0]["data"] == [factor * each for each in (1, 2, 3, 4)]
        config = wire.send(gateway.http, "GET", f"/v2/models/{name}/config").json
        assert config["max_batch_size"] == 8


def test_all_of_them_are_completed_without_the_flag(root: Path) -> None:
    with serving(root, "--allow-python", "--strict-model-config", "false") as gateway:
        index = wire.send(gateway.http, "POST", "/v2/repository/index").json
        assert {row["state"] for row in index} == {"READY"}
        config = wire.send(gateway.http, "GET", "/v2/models/code/config").json
        assert config["max_batch_size"] == 64
