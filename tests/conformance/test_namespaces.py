"""``--model-namespacing``: models of the same name in several repositories."""

from __future__ import annotations

import base64
import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from tests import models
from tests.conformance import wire
from tests.server import Gateway, serving

TENSOR = "data_type: TYPE_FP32 dims: 4"
ENSEMBLE = f"""
platform: "ensemble"
max_batch_size: 4
input {{ name: "x" {TENSOR} }}
output {{ name: "y" {TENSOR} }}
ensemble_scheduling {{ step {{ model_name: "m" model_version: -1
  input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "y" }} }} }}
"""
FACTORS = {"a": 2, "b": 3}


class Namespaces(NamedTuple):
    """A gateway, and its repositories by their letter."""

    gateway: Gateway
    roots: dict[str, Path]

    def known(self, letter: str) -> str:
        return f"{self.roots[letter]}::m"

    def send(self, method: str, path: str, body: bytes = b"") -> wire.WireReply:
        return wire.send(self.gateway.http, method, path, body)

    def load(self, name: str) -> None:
        reply = self.send("POST", f"/v2/repository/models/{name}/load")
        assert reply.status == 200, reply.body

    def factor(self, name: str) -> float | str:
        """The model's factor, or the error."""
        reply = self.send("POST", wire.infer_path(name), wire.good_body())
        if reply.status != 200:
            return f"{reply.status} {reply.json['error']}"
        return float(reply.json["outputs"][0]["data"][0])

    def index(self) -> dict[str, str]:
        rows = self.send("POST", "/v2/repository/index").json
        return {row["name"]: row.get("state", "") for row in rows}

    def served(self, name: str) -> int:
        found = json.loads(self.send("GET", "/v2/models/stats").body)["model_stats"]
        return int(next(each["inference_count"] for each in found if each["name"] == name))


def put(root: Path, letter: str) -> None:
    models.multiply(root / "m" / "1" / "model.onnx", FACTORS[letter])


AMBIGUOUS = (
    "400 There are 2 identifiers of model 'm' in global map, model namespace must be provided to "
    "resolve ambiguity."
)


PROCESSES = [(), pytest.param(("--workers", "2"), marks=pytest.mark.thorough)]


@pytest.fixture(params=PROCESSES, ids=["one", "workers"])
def spaces(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Namespaces]:
    """Repositories ``a`` and ``b``, each with ``m`` and an ensemble of it; none is loaded."""
    roots = {letter: tmp_path / letter for letter in FACTORS}
    for letter, root in roots.items():
        put(root, letter)
        ensemble = root / f"ensemble_{letter}"
        (ensemble / "1").mkdir(parents=True)
        (ensemble / "config.pbtxt").write_text(ENSEMBLE)
    flags = ("--model-repository", str(roots["b"]), "--model-namespacing", "true")
    explicit = ("--model-control-mode", "explicit", *request.param)
    with serving(roots["a"], *flags, *explicit) as gateway:
        yield Namespaces(gateway, roots)


def test_an_ensemble_calls_the_model_of_its_repository_and_the_name_alone_is_ambiguous(
    spaces: Namespaces,
) -> None:
    for letter, factor in FACTORS.items():
        spaces.load(f"ensemble_{letter}")
        assert spaces.factor(f"ensemble_{letter}") == factor
    assert spaces.factor("m") == AMBIGUOUS
    names = {spaces.known("a"), spaces.known("b"), "ensemble_a", "ensemble_b"}
    assert spaces.index() == dict.fromkeys(names, "READY")
    with wire.stub(spaces.gateway.grpc) as stub:
        message = wire.good_message()
        message.model_name = spaces.known("b")
        response = stub.ModelInfer(message)
        assert response.model_name == message.model_name
        message.model_name = "m"
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(message)
        assert caught.value.details() == AMBIGUOUS.removeprefix("400 ")
    with urllib.request.urlopen(spaces.gateway.metrics) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line for line in lines if line.startswith("nv_inference_request_success{")]
    for letter in FACTORS:
        assert any(
            f'model="{spaces.known(letter)}"' in line
            and f'namespace="{spaces.roots[letter]}"' in line
            for line in counts
        ), counts


def test_a_load_or_an_unload_of_an_ambiguous_name_is_of_all_its_models(spaces: Namespaces) -> None:
    known = {spaces.known("a"), spaces.known("b")}
    spaces.load("m")
    assert {spaces.index()[name] for name in known} == {"READY"}
    content = base64.b64encode((spaces.roots["a"] / "m" / "1" / "model.onnx").read_bytes())
    sent = {"config": '{"backend": "onnxruntime"}', "file:1/model.onnx": content.decode()}
    body = json.dumps({"parameters": sent}).encode()
    assert spaces.send("POST", "/v2/repository/models/m/load", body).status == 200
    assert spaces.factor("m") == FACTORS["a"]  # a model without a namespace hides the others
    spaces.load("m")
    assert spaces.factor("m") == AMBIGUOUS
    reply = spaces.send("POST", "/v2/repository/models/m/unload")
    assert reply.status == 200
    assert {spaces.index()[name] for name in known} == {"UNAVAILABLE"}


def test_a_model_goes_on_while_its_name_becomes_ambiguous_and_unique(spaces: Namespaces) -> None:
    away = spaces.roots["a"].parent / "away"
    shutil.move(spaces.roots["a"] / "m", away)
    for letter in FACTORS:
        spaces.load(f"ensemble_{letter}")
        assert spaces.factor(f"ensemble_{letter}") == FACTORS["b"]
    assert spaces.factor("m") == FACTORS["b"]
    served = spaces.served("m")
    shutil.move(away, spaces.roots["a"] / "m")
    spaces.load("ensemble_a")
    for letter, factor in FACTORS.items():
        assert spaces.factor(f"ensemble_{letter}") == factor
    assert spaces.served(spaces.known("b")) == served + 1
    assert spaces.factor("m") == AMBIGUOUS
    shutil.rmtree(spaces.roots["a"] / "m")
    spaces.load("ensemble_a")
    for name in ("ensemble_a", "ensemble_b", "m"):
        assert spaces.factor(name) == FACTORS["b"]
    assert spaces.served("m") == served + 4


def test_an_ensemble_sent_with_a_load_calls_the_model_of_its_repository(spaces: Namespaces) -> None:
    tensor: dict[str, Any] = {"data_type": "TYPE_FP32", "dims": [4]}
    step = {
        "model_name": "m",
        "model_version": -1,
        "input_map": {"x": "x"},
        "output_map": {"y": "y"},
    }
    config = {
        "platform": "ensemble", "max_batch_size": 4, "ensemble_scheduling": {"step": [step]},
        "input": [{"name": "x", **tensor}], "output": [{"name": "y", **tensor}],
    }  # fmt: skip
    body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
    reply = spaces.send("POST", "/v2/repository/models/ensemble_b/load", body)
    assert reply.status == 200, reply.body
    assert spaces.factor("ensemble_b") == FACTORS["b"]
