"""``modelport certify``: an ONNX file from elsewhere gets a certificate, or is not published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner, Result
from onnx import TensorProto, helper, numpy_helper

from modelport.exporters import api
from modelport.exporters.cli.certify import certify
from modelport.exporters.cli.keygen import keygen
from modelport.exporters.cli.verify import verify
from modelport.gateway.backend_registry import find_loader
from modelport.gateway.errors import UsageError
from modelport.gateway.models.loader import VersionLoader
from modelport.gateway.models.model_config import read_config
from modelport.gateway.repository import scan, signing_keys
from modelport.gateway.settings import Settings
from modelport.gateway.telemetry.statistics import Statistics

WEIGHT = np.arange(8, dtype=np.float32).reshape(4, 2)


def write(folder: Path, weight: Any = WEIGHT, external: bool = False) -> Path:
    """``scores = features @ weight``, as another exporter wrote it."""
    x = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 2])
    node = helper.make_node("MatMul", ["features", "weight"], ["scores"])
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(weight, "weight")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options: Any = {"size_threshold": 0, "location": "net.weights"} if external else {}
    onnx.save(model, folder / "net.onnx", save_as_external_data=external, **options)
    return folder / "net.onnx"


def record(folder: Path, **more: Any) -> Path:
    features = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    np.savez(folder / "samples.npz", features=features, **{"scores": features @ WEIGHT, **more})
    return folder / "samples.npz"


def invoke(command: Any, *arguments: object) -> Result:
    return CliRunner().invoke(command, [*map(str, arguments), "--quiet"])


@pytest.mark.parametrize("external", [False, True])
def test_a_file_is_certified_against_recorded_answers_signed_and_served(
    tmp_path: Path, external: bool
) -> None:
    assert CliRunner().invoke(keygen, ["--output", str(tmp_path / "key")]).exit_code == 0
    private, public = sorted(tmp_path.glob("key*"))
    repository, samples = tmp_path / "repository", record(tmp_path)
    arguments = ("--repository", repository, "--sign-key", private, "--json")
    done = invoke(certify, write(tmp_path, external=external), "--against", samples, *arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)[0]["samples"] >= 30
    version = repository / "net" / "1"
    document = json.loads((version / "certificate.json").read_text())
    assert document["artifact"]["opset"] == 17
    assert document["checkpoint"]["file"] == "samples.npz"
    assert (version / "net.weights").exists() == external
    keys = ("--public-key", public)
    done = invoke(verify, version, "--checkpoint", samples, *keys)
    assert done.exit_code == 0, done.output
    entry = scan.scan([repository])["net"]
    settings = Settings((repository,), require_signature=(signing_keys.load_public_key(public),))
    loader = VersionLoader(settings, find_loader, 1)
    config = read_config(entry)
    config.ClearField("model_warmup")  # the samples run on the event loop of a host
    loaded = loader.load(entry, entry.versions[1], config, Statistics())
    assert [output.name for output in loaded.backend.config.output] == ["scores"]


def test_a_file_from_elsewhere_is_not_optimised(tmp_path: Path) -> None:
    file, samples = write(tmp_path), record(tmp_path)
    with pytest.raises(UsageError, match="certified as it is; omit --optimize"):
        api.certify(file, samples, repository=tmp_path / "repository", optimize="O2")


def test_a_file_is_certified_against_its_checkpoint(tmp_path: Path) -> None:
    torch.save({"weight": torch.from_numpy(WEIGHT.T.copy())}, tmp_path / "net.pt")
    kwargs = json.dumps({"in_features": 4, "out_features": 2, "bias": False})
    arguments = (
        *("--against", tmp_path / "net.pt", "--model", "torch.nn:Linear", "--model-kwargs", kwargs),
        *("--input", "features:FP32[4]", "--output-name", "scores", "--samples", 20),
        *("--repository", tmp_path / "repository"),
    )
    done = invoke(certify, write(tmp_path), *arguments, "--name", "right")
    assert done.exit_code == 0, done.output
    done = invoke(certify, write(tmp_path, WEIGHT * np.float32(1.01)), *arguments)
    assert done.exit_code == 3, done.output
    assert [path.name for path in (tmp_path / "repository").iterdir()] == ["right"]


def test_every_answer_of_equal_inputs_is_compared(tmp_path: Path) -> None:
    features = np.ones((30, 4), np.float32)
    scores = features @ WEIGHT
    scores[3] += 1
    for name, code in (("SAMPLES.NPZ", 3), ("samples.npz", 3)):
        with (tmp_path / name).open("wb") as file:
            np.savez(file, features=features, scores=scores)
        place = ("--repository", tmp_path / "repository")
        done = invoke(certify, write(tmp_path), "--against", tmp_path / name, *place)
        assert (done.exit_code, "'scores' differs" in done.output) == (code, True), done.output


def test_what_is_wrong_is_not_certified(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    artifact, samples = write(tmp_path), record(tmp_path)

    def refused(code: int, *arguments: object) -> str:
        done = invoke(certify, *arguments, "--repository", repository)
        assert done.exit_code == code, done.output
        assert len(done.output.strip().splitlines()) == 1
        assert not repository.exists()
        return done.output

    other = write(tmp_path, WEIGHT + np.float32(0.01))
    assert "'scores' differs" in refused(3, other, "--against", samples)
    artifact = write(tmp_path)
    last = record(tmp_path, scores=np.zeros((30, 2), np.float32))
    assert "'scores' differs" in refused(3, artifact, "--against", last)
    short = record(tmp_path, scores=np.zeros((3, 2), np.float32))
    assert "the numbers of rows differ" in refused(2, artifact, "--against", short)
    named = ("--output-name", "logits")
    assert "no output 'logits'" in refused(2, artifact, "--against", record(tmp_path), *named)
    assert "does not exist" in refused(2, tmp_path / "no.onnx", "--against", samples)
    (tmp_path / "net.pt").write_bytes(b"")
    assert "is not an ONNX file" in refused(2, tmp_path / "net.pt", "--against", samples)
    foreign = helper.make_graph(
        [helper.make_node("Evil", ["features"], ["scores"], domain="evil")], "g",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 2])],
    )  # fmt: skip
    onnx.save(helper.make_model(foreign), tmp_path / "evil.onnx")
    assert "evil.Evil" in refused(5, tmp_path / "evil.onnx", "--against", record(tmp_path))
