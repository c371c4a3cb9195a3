"""Models outside a repository: a file, a SavedModel, or a model's own folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import pytest

from modelport.gateway.cli.serve import settings_of
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.repository import standalone_model
from tests import models


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for version in (1, 2, 10):
        models.multiply(tmp_path / f"repository/iris/{version}/model.onnx")
    return tmp_path / "repository"


def test_a_file_is_version_1_of_a_model_of_its_name(tmp_path: Path) -> None:
    models.multiply(tmp_path / "my net.onnx")
    entry = standalone_model.scan(tmp_path / "my net.onnx")
    assert (entry.name, list(entry.versions)) == ("my_net", [1])


def test_a_file_in_a_version_is_that_version(repository: Path) -> None:
    entry = standalone_model.scan(repository / "iris/2/model.onnx")
    assert (entry.name, list(entry.versions)) == ("iris", [2])


def test_a_models_folder_is_all_of_its_versions(repository: Path) -> None:
    entry = standalone_model.scan(repository / "iris")
    assert (entry.name, sorted(entry.versions)) == ("iris", [1, 2, 10])


def test_a_model_is_distinguished_from_a_repository(tmp_path: Path, repository: Path) -> None:
    numbered = tmp_path / "numbered"  # a repository whose models are called 1 and 2
    models.multiply(numbered / "1/1/model.onnx")
    models.multiply(numbered / "2/1/model.onnx")
    configured = tmp_path / "configured"
    configured.mkdir()
    (configured / "config.pbtxt").write_text('backend: "onnxruntime"')
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "saved_model.pb").touch()
    folders = (repository / "iris", configured, saved)
    assert [p.name for p in folders if standalone_model.is_model(p)] == [
        "iris", "configured", "saved",
    ]  # fmt: skip
    assert not standalone_model.is_model(repository)
    assert not standalone_model.is_model(numbered)


@pytest.mark.parametrize(
    ("name", "words"),
    [("net.keras", "export it first"), ("net.txt", "is not a model that can be served")],
)
def test_what_cannot_be_served_is_refused_with_the_remedy(
    tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / name).touch()
    with pytest.raises(InvalidArgument, match=words):
        settings_of([str(tmp_path / name)])


def test_the_settings_leave_the_scan_of_a_models_files_to_the_start(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone_model, "scan_model", None)
    monkeypatch.setattr(standalone_model, "fingerprint", None)
    file, folder = repository / "iris/2/model.onnx", repository / "iris"
    assert settings_of([str(file), str(folder)]).models == (file, folder)


def test_a_model_given_as_a_repository_is_refused_with_the_remedy(repository: Path) -> None:
    with pytest.raises(click.UsageError, match="is a model; pass its parent"):
        settings_of(["--model-repository", str(repository / "iris")])


def test_files_folders_and_repositories_are_served_together(
    tmp_path: Path, repository: Path
) -> None:
    lone = models.multiply(tmp_path / "lone.onnx")
    other = models.multiply(tmp_path / "other/1/model.onnx").parents[1]

    async def ready() -> list[tuple[str, str]]:
        manager = ModelManager(settings_of([str(lone), str(other), str(repository)]))
        await manager.start()
        rows = [(row["name"], row["version"]) for row in manager.index(ready_only=True)]
        await manager.stop()
        return rows

    assert asyncio.run(ready()) == [("iris", "10"), ("lone", "1"), ("other", "1")]
