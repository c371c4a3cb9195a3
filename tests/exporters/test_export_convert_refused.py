"""Refusals of ``modelport convert``: one line, the right exit code, and nothing is left behind."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conversion import done, failed, fraud, run, save
from tests.pickle_bomb import PickleBomb

LAYER = "encoder.layers"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one fraud model as ``a.pt`` and as ``a.keras``."""
    folder = tmp_path_factory.mktemp("convert")
    save(fraud().state_dict(), folder / "a.pt")
    done(run(folder / "a.pt", folder / "a.keras"))
    return folder


def edited(source: Path, target: Path, edit: Callable[[list[Any]], None]) -> Path:
    """A ``.keras`` file with other layers in its configuration."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as changed:
        for name in archive.namelist():
            content = archive.read(name)
            if name == "config.json":
                config = json.loads(content)
                edit(config["config"]["layers"])
                content = json.dumps(config).encode()
            changed.writestr(name, content)
    return target


def named(found: list[Any], name: str) -> Any:
    return next(layer for layer in found if layer["name"] == name)


@pytest.mark.thorough
def test_another_architecture_around_the_same_weights_is_refused(
    files: Path, tmp_path: Path
) -> None:
    def activate(found: list[Any]) -> None:
        named(found, f"{LAYER}.1.linear1")["config"]["activation"] = "gelu"

    other = edited(files / "a.keras", tmp_path / "b.keras", activate)
    said = f'layer \'{LAYER}.1.linear1\': its activation is "gelu", not "linear"'
    assert said in failed(run(other, tmp_path / "c.pt"), 2)
    assert said in failed(run(files / "a.pt", other, "--check"), 3)


def test_a_lambda_layer_is_refused_with_the_reason(files: Path, tmp_path: Path) -> None:
    def smuggle(found: list[Any]) -> None:
        named(found, "pooled")["class_name"] = "Lambda"

    other = edited(files / "a.keras", tmp_path / "b.keras", smuggle)
    assert "is a Lambda, which holds Python code" in failed(run(other, tmp_path / "c.pt"), 5)


def test_a_configuration_that_names_other_code_is_refused(files: Path, tmp_path: Path) -> None:
    def smuggle(found: list[Any]) -> None:
        hostile = {"module": "os", "class_name": "function", "config": "system"}
        named(found, "head")["config"]["activation"] = hostile

    other = edited(files / "a.keras", tmp_path / "b.keras", smuggle)
    assert "wants to run 'os.system' while loading" in failed(run(other, tmp_path / "c.pt"), 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.keras"]


@pytest.mark.parametrize("role", ["source", "target"])
def test_a_malicious_pickle_does_not_run(files: Path, tmp_path: Path, role: str) -> None:
    torch.save({"model_state_dict": PickleBomb(tmp_path / "ran")}, tmp_path / "b.pt")
    ends = [tmp_path / "b.pt", tmp_path / "c.keras"]
    if role == "target":
        ends = [files / "a.keras", tmp_path / "b.pt", "--check"]
    assert "wants to run" in failed(run(*ends), 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.pt"]


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("a.keras", "b.keras", "both tensorflow files"),
        ("a.pt", "b.safetensors", "both pytorch files"),
        ("a.h5", "b.pt", "legacy HDF5 .* without safe mode, so that a Lambda layer"),
        ("a.pt", "b.h5", "use a .keras file"),
        ("a.index", "b.pt", "restore a TensorFlow checkpoint in Keras"),
        ("a.pt", "b.onnx", "no known extension: use .bin, .ckpt, .pt"),
        ("no.pt", "b.keras", "SOURCE .* is not a file"),
        ("a.pt", "no/b.keras", "is not a folder"),
        ("a.keras", "a.pt", "never overwritten.* add --check"),
    ],
)
def test_a_file_name_that_does_not_do_is_refused(
    files: Path, source: str, target: str, said: str
) -> None:
    before = sorted(path.name for path in files.iterdir())
    assert re.search(said, failed(run(files / source, files / target), 2))
    assert sorted(path.name for path in files.iterdir()) == before


def test_wrong_arguments_are_refused_and_leave_nothing(files: Path, tmp_path: Path) -> None:
    target = tmp_path / "b.pt"
    keras_file = files / "a.keras"
    assert "omit --check" in failed(run(keras_file, target, "--check"), 2)
    assert "has no Keras port" in failed(run(keras_file, target, model="unet"), 4)
    assert "not registered" in failed(run(keras_file, target, model="nope"), 2)
    assert "not a ViT's" in failed(run(keras_file, target, model="vit"), 2)
    kwargs = ("--model-kwargs", '{"num_layers": 2}')
    assert "does not fit the model" in failed(run(keras_file, target, *kwargs), 2)
    assert "does not fit the model" in failed(run(files / "a.pt", tmp_path / "b.keras", *kwargs), 2)
    assert "is not JSON" in failed(run(keras_file, target, "--model-kwargs", "{"), 2)
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_an_integrity_error(files: Path, tmp_path: Path) -> None:
    whole = tmp_path / "b.weights.h5"
    done(run(files / "a.pt", whole))
    for path in (files / "a.keras", whole):
        cut = tmp_path / f"cut.{path.name}"
        cut.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
        assert "is damaged" in failed(run(cut, tmp_path / "c.pt"), 5)
