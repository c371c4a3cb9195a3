"""Copies of published models, as benchmarks and the stand-in for TensorFlow Serving make them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import shadow
from tests.loadtests import tensorflow_model_server

COMPANIONS = ("config.pbtxt", "labels.txt", "warmup/batch_8_input_1")


def by_shadow(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return shadow._repository(model, folder / "copies") / model.name


def by_standin(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STANDIN_CONFIG", str(model))
    (folder / "run").mkdir()
    file = folder / "run" / "models.config"
    file.write_text(f'config {{ name: "fraud" base_path: "{folder / "bases"}" }}')
    (folder / "bases" / "1").mkdir(parents=True)
    return tensorflow_model_server.tensorflow_models(file) / model.name


@pytest.mark.parametrize("copied", [by_shadow, by_standin])
def test_a_copy_of_a_model_has_the_files_that_its_configuration_names(
    copied: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "published" / "fraud"
    for name in (*COMPANIONS, "9/model.onnx", "10/model.onnx"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(name)
    copy = copied(model, tmp_path, monkeypatch)
    files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert {name for name in files if not name[0].isdigit()} == set(COMPANIONS)
    for version in copy.glob("[0-9]*/model.onnx"):
        assert version.read_text() == "10/model.onnx", "the newest version is the largest number"
