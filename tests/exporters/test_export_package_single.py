"""One version packaged for a server that the gateway starts, from what a backend is given."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from modelport.exporters.packaging import managed_server_package
from modelport.gateway.errors import Unsupported
from modelport.gateway.repository import config
from tests import models


def given(text: str) -> config.ModelConfig:
    return config.complete(config.parse(text), "x2")


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A verified copy: nothing lies around it."""
    folder = tmp_path / "copy" / "x2" / "3"
    models.multiply(folder / "model.onnx")
    return folder


def test_triton_gets_the_version_with_a_configuration_for_it_alone(
    version: Path, tmp_path: Path
) -> None:
    text = models.X2_CONFIG.replace("dims: 4 }\n", 'dims: 4 label_filename: "labels.txt" }\n')
    wanted = text.replace('label_filename: "labels.txt"', "", 1) + (
        'model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP32 dims: 4 '
        'input_data_file: "x" } } }'
    )
    target = tmp_path / "packaged"
    managed_server_package.write("x2", 3, version, given(wanted), "triton", target)
    written = config.parse((target / "x2" / "config.pbtxt").read_text())
    assert list(written.version_policy.specific.versions) == [3]
    assert not written.output[0].label_filename
    assert not written.model_warmup
    assert (target / "x2" / "3" / "model.onnx").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "packaged"]


def test_a_format_that_the_server_does_not_load_is_refused_with_the_remedy(
    version: Path, tmp_path: Path
) -> None:
    with pytest.raises(Unsupported, match=r"is onnx.*export it with --format torchscript"):
        managed_server_package.write(
            "x2", 3, version, given(models.X2_CONFIG), "torchserve", tmp_path / "x2.mar"
        )


def test_a_model_that_is_code_is_for_triton_only(version: Path, tmp_path: Path) -> None:
    (version / "model.onnx").unlink()
    (version / "model.py").write_text("raise SystemExit('nobody here runs this')\n")
    wanted = given(models.X2_CONFIG.replace("onnxruntime", "python"))
    managed_server_package.write("x2", 3, version, wanted, "triton", tmp_path / "packaged")
    assert (tmp_path / "packaged" / "x2" / "3" / "model.py").is_file()
    for server in ("torchserve", "tfserving"):
        with pytest.raises(Unsupported):
            managed_server_package.write("x2", 3, version, wanted, server, tmp_path / "other")


def test_torchserve_gets_an_archive_with_the_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "copy" / "x2" / "3"
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(b"the packager does not look inside")
    wanted = given(models.X2_CONFIG.replace("onnxruntime", "pytorch"))
    managed_server_package.write("x2", 3, folder, wanted, "torchserve", tmp_path / "x2.mar")
    shutil.rmtree(folder)
    names = zipfile.ZipFile(tmp_path / "x2.mar").namelist()
    assert {"MAR-INF/MANIFEST.json", "model.pt"} <= set(names)
