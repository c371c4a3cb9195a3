"""OpenVINO IR: export, proof, inspection and precision, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from modelport.exporters.cli.export import export
from modelport.exporters.cli.inspect import inspect
from modelport.exporters.cli.verify import verify
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import FORMATS
from modelport.exporters.loaded_model import Framework
from modelport.gateway.errors import Unsupported
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec

KWARGS = json.dumps({"num_heads": 2})


def test_a_checkpoint_is_exported_proven_verified_and_inspected(
    vit_checkpoint: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    arguments = [
        "--model",
        "vit",
        "--model-kwargs",
        KWARGS,
        "--samples",
        "40",
        "--repository",
        str(repository),
        "--quiet",
    ]
    arguments = [str(vit_checkpoint), *arguments, "--format", "openvino", "--dtype", "fp16"]
    done = CliRunner().invoke(export, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    (result,) = json.loads(done.output)
    assert (result["format"], result["precision"], result["agreement"]) == ("openvino", "fp16", 1.0)
    version = repository / "vit" / "1"
    config = (version.parent / "config.pbtxt").read_text()
    assert 'backend: "openvino"' in config
    checkpoint = ["--checkpoint", str(vit_checkpoint)]
    done = CliRunner().invoke(verify, [str(version), *checkpoint, "--quiet"])
    assert done.exit_code == 0, done.output
    found = json.loads(CliRunner().invoke(inspect, [str(version), "--json"]).output)
    assert found["format"] == "openvino"
    assert [(t["name"], t["shape"]) for t in found["inputs"]] == [("image", ["batch", 1, 8, 8])]
    assert found["weights"]["FP16"] > 0.9 * found["parameters"]
    assert found["external_data"][0]["file"] == "model.bin"
    (version / "model.bin").write_bytes(b"")
    assert CliRunner().invoke(verify, [str(version), *checkpoint, "--quiet"]).exit_code == 5


def test_a_datatype_that_openvino_narrows_is_refused(tmp_path: Path) -> None:
    from types import SimpleNamespace

    wide = TensorSpec("x", Datatype.FP64, (4,))
    source = SimpleNamespace(
        framework=Framework.PYTORCH, signature=ModelSignature((wide,), (wide,), 8)
    )
    with pytest.raises(Unsupported, match="'x' is FP64, which OpenVINO computes in 32 bits"):
        FORMATS.builtin["openvino"].export(source, tmp_path / "model.xml", ExportTarget())  # type: ignore[arg-type]
