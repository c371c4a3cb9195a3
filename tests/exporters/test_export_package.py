"""``modelport package``: what every package has in common, and TorchServe's archive."""

from __future__ import annotations

import ast
import errno
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelport.exporters.packaging import SERVERS, tfserving, torchserve
from modelport.gateway.repository import config, manifest
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec
from tests.packages import X, packaged, put, refused, run

Snapshot = Callable[[Path], dict[str, str]]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "repository"


def test_a_damaged_version_is_not_packaged_and_nothing_is_left(
    repository: Path, tmp_path: Path
) -> None:
    folder = put(repository, "m", "onnx")
    (folder / "model.onnx").write_bytes(b"onnx 2")
    before = sorted(tmp_path.iterdir())
    result = run(folder, "triton", tmp_path / "out")
    refused(result, 5, "version 1 of 'm'", "'model.onnx' does not match its SHA-256")
    assert sorted(tmp_path.iterdir()) == before


def test_a_version_without_a_manifest_is_not_packaged(repository: Path, tmp_path: Path) -> None:
    (put(repository, "m", "onnx") / manifest.FILENAME).unlink()
    refused(run(repository / "m", "triton", tmp_path / "out"), 5, "no manifest.json")
    assert not (tmp_path / "out").exists()


def test_a_version_with_a_pickle_in_it_is_not_packaged(repository: Path, tmp_path: Path) -> None:
    folder = put(repository, "m", "onnx")
    (folder / "extra.pkl").write_bytes(b"")
    manifest.write(folder)
    refused(run(folder, "triton", tmp_path / "out"), 5, "extra.pkl", "may run code")


@pytest.mark.parametrize(
    ("server", "format_name", "words"),
    [
        ("torchserve", "onnx", ("'m' is onnx", "--format torchscript")),
        ("torchserve", "savedmodel", ("'m' is savedmodel", "--format torchscript")),
        ("tfserving", "tflite", ("'m' is tflite", "--format savedmodel")),
        ("tfserving", "onnx", ("'m' is onnx", "--format savedmodel")),
        ("triton", "tflite", ("no backend for TFLite", "--format onnx or torchscript")),
        ("triton", "pt2", ("no exported program", "--format onnx or torchscript")),
        ("triton", "aoti", ("torch_aoti platform is beta", "--format onnx or torchscript")),
    ],
)
def test_a_format_that_does_not_fit_is_refused_and_the_one_that_does_is_named(
    server: str, format_name: str, words: tuple[str, ...], repository: Path, tmp_path: Path
) -> None:
    folder = put(repository, "m", format_name)
    output = tmp_path / f"out{SERVERS[server].suffix}"
    refused(run(folder, server, output), 4, *words)
    assert list(tmp_path.iterdir()) == [repository]


@pytest.mark.parametrize("server", list(SERVERS))
def test_what_is_there_is_never_overwritten(
    server: str, repository: Path, tmp_path: Path, snapshot: Snapshot
) -> None:
    format_name = SERVERS[server].formats[0]
    folder = put(repository, "m", format_name)
    output = tmp_path / f"out{SERVERS[server].suffix}"
    output.mkdir()
    before = snapshot(tmp_path)
    refused(run(folder, server, output), 2, "never overwritten")
    assert snapshot(tmp_path) == before


def test_a_failure_half_way_leaves_nothing(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(repository, "m", "savedmodel")

    def fail(*_: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tfserving, "_entry", fail)
    refused(
        run(folder, "tfserving", tmp_path / "out"), 2, "No space left on device", "free space there"
    )
    assert list(tmp_path.iterdir()) == [repository]


def test_what_appears_meanwhile_is_not_replaced(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, output = put(repository, "m", "torchscript"), tmp_path / "m.mar"
    monkeypatch.setattr(torchserve, "write", lambda models, target, base_path: _both(target))

    def _both(target: Path) -> None:
        target.write_text("mine")
        output.write_text("another's")

    refused(run(folder, "torchserve", output), 2, "was created by another process")
    assert output.read_text() == "another's"
    assert sorted(tmp_path.iterdir()) == [output, repository]


def test_arguments_that_are_wrong_are_refused(repository: Path, tmp_path: Path) -> None:
    folder = put(repository, "m", "torchscript")
    mar = tmp_path / "m.mar"
    refused(run(tmp_path / "no", "torchserve", mar), 2, "no' does not exist")
    refused(run(folder / "model.pt", "torchserve", mar), 2, "is not a folder")
    refused(run(tmp_path / "repository" / "m" / "1", "torchserve", tmp_path / "m.zip"), 2, ".mar")
    refused(run(folder, "torchserve", tmp_path / "no" / "m.mar"), 2, "is not a folder; create it")
    refused(run(folder, "torchserve", folder / "m.mar"), 2, "is inside the packaged folder")
    refused(run(repository, "torchserve", mar), 2, "holds one model")
    refused(run(folder, "torchserve", mar, "--base-path", "/m"), 2, "--base-path")
    refused(run(folder, "tensorrt", mar), 2, "tensorrt")
    (tmp_path / "empty").mkdir()
    refused(run(tmp_path / "empty", "triton", tmp_path / "out"), 2, "holds no model")
    shutil.rmtree(folder)
    refused(run(repository / "m", "torchserve", mar), 2, "has no version")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "repository"]


def test_a_configuration_that_does_not_parse_is_named(repository: Path, tmp_path: Path) -> None:
    folder = put(repository, "m", "onnx")
    (folder.parent / config.FILENAME).write_text("max_batch_size: many")
    refused(run(folder, "triton", tmp_path / "out"), 2, "model 'm'", "config.pbtxt")


def contents(archive: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(archive) as file:
        return {info.filename: file.read(info) for info in file.infolist()}


def test_a_torchserve_archive_holds_the_model_its_handler_and_its_signature(
    repository: Path, tmp_path: Path
) -> None:
    signature = ModelSignature(
        (TensorSpec("tokens", Datatype.INT64, ("sequence",), 0, 31),),
        (TensorSpec("probability", Datatype.FP32, (1,), reshape=()),),
        4,
        {"sequence": Axis("sequence", 1, 12)},
    )
    folder = put(repository, "m", "torchscript", signature, version=3)
    found = contents(packaged(folder, "torchserve", tmp_path / "m.mar"))
    listed = json.loads(found["MAR-INF/MANIFEST.json"])
    assert listed["runtime"] == "python"
    assert listed["model"] == {
        "modelName": "m",
        "modelVersion": "3",
        "serializedFile": "model.pt",
        "handler": "modelport_handler.py",
    }
    assert found["model.pt"] == (folder / "model.pt").read_bytes()
    assert {"certificate.json", "certificate.json.sig", "modelport_handler.py"} <= found.keys()
    told = json.loads(found["signature.json"])
    assert (told["name"], told["version"], told["max_batch_size"]) == ("m", "3", 4)
    assert told["axes"] == {"sequence": [1, 12]}
    assert told["inputs"][0] == {
        "name": "tokens",
        "datatype": "INT64",
        "dims": ["sequence"],
        "reshape": None,
        "minimum": 0,
        "maximum": 31,
    }
    assert told["outputs"][0]["reshape"] == []


def test_the_same_version_gives_the_same_archive(repository: Path, tmp_path: Path) -> None:
    folder = put(repository, "m", "torchscript")
    first = packaged(folder, "torchserve", tmp_path / "a.mar").read_bytes()
    assert packaged(folder, "torchserve", tmp_path / "b.mar").read_bytes() == first


def test_the_handler_in_an_archive_imports_nothing_but_torch_numpy_and_python(
    repository: Path, tmp_path: Path
) -> None:
    folder = put(repository, "m", "torchscript")
    found = contents(packaged(folder, "torchserve", tmp_path / "m.mar"))
    code = [found[name] for name in found if name.startswith("modelport_torchserve/")]
    names = set()
    for node in (node for text in code for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module).split(".")[0])
    assert {"torch", "numpy"} <= names
    assert not names & {"exporters", "gateway", "google", "onnxruntime", "tritonclient", "ts"}


def test_of_a_models_folder_the_newest_version_that_is_served_is_archived(
    repository: Path, tmp_path: Path
) -> None:
    for version in (1, 2, 10):
        put(repository, "m", "torchscript", version=version)
    found = contents(packaged(repository / "m", "torchserve", tmp_path / "newest.mar"))
    assert found["model.pt"] == b"torchscript 10"
    found = contents(packaged(repository / "m" / "2", "torchserve", tmp_path / "second.mar"))
    assert found["model.pt"] == b"torchscript 2"


def test_tensors_that_torch_has_not_are_refused(repository: Path, tmp_path: Path) -> None:
    text = TensorSpec("text", Datatype.BYTES, (1,))
    folder = put(repository, "m", "torchscript", ModelSignature((text,), (X,), 8))
    refused(run(folder, "torchserve", tmp_path / "m.mar"), 4, "'text' of 'm' is BYTES")
