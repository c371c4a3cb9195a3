"""Models outside a repository: a file, a SavedModel, or a model's own folder."""

from __future__ import annotations

import asyncio
import hashlib
import json
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


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("my net.onnx", "my net"),
        ("deep/net.onnx", "net"),
        ("iris/model.onnx", "iris"),
        ("deep/iris/model.onnx", "iris"),
        ("iris/2/model.onnx", "iris"),
        ("iris/2/net.onnx", "net"),
        ("model.onnx", "model"),
        ("./model.onnx", "model"),
    ],
)
def test_a_file_is_named_by_its_name_or_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    models.multiply(Path(path))
    [(found, _)] = settings_of([path]).models
    assert found == name


def test_a_file_is_version_1_of_its_model(tmp_path: Path) -> None:
    models.multiply(tmp_path / "net.onnx")
    entry = standalone_model.scan(tmp_path / "net.onnx", "any name")
    assert (entry.name, list(entry.versions)) == ("any name", [1])


def test_a_file_in_a_version_is_that_version(repository: Path) -> None:
    entry = standalone_model.scan(repository / "iris/2/model.onnx", "iris")
    assert (entry.name, list(entry.versions)) == ("iris", [2])


def test_a_models_folder_is_all_of_its_versions(repository: Path) -> None:
    entry = standalone_model.scan(repository / "iris", "iris")
    assert (entry.name, sorted(entry.versions)) == ("iris", [1, 2, 10])


def test_the_user_names_models(repository: Path, tmp_path: Path) -> None:
    file, folder = repository / "iris/2/model.onnx", repository / "iris"
    assert settings_of([f"a b={file}", f"c={folder}"]).models == (("a b", file), ("c", folder))
    assert settings_of([str(file), "--name", "d"]).models == (("d", file),)
    odd = models.multiply(tmp_path / "x=y.onnx")
    assert settings_of([str(odd)]).models == (("x=y", odd),)
    assert settings_of([str(file), str(file)]).models == (("iris", file),)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a/net.onnx", "b/net.onnx"], "are both named 'net'; name them: NAME=PATH"),
        (["n=a/net.onnx", "n=b/net.onnx"], "are both named 'n'"),
        (["n=iris/.."], "is a repository"),
        (["n=s3://bucket/models"], "names a single model"),
        (["..=a/net.onnx"], "'..' is not a model's name"),
        (["a/net.onnx", "--name", "x/y"], "--name 'x/y' is not a model's name"),
        (["a/net.onnx", "c=b/net.onnx", "--name", "n"], "--name needs one PATH"),
        (["a", "--name", "n"], "is a repository"),
        (["n=nowhere.onnx"], "'nowhere.onnx' does not exist"),
    ],
)
def test_names_that_do_not_fit_are_refused(
    repository: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(repository)
    for name in ("a", "b"):
        models.multiply(repository / name / "net.onnx")
    with pytest.raises(click.UsageError, match=words):
        settings_of(arguments)


def test_a_model_answers_under_the_name_that_it_was_given(repository: Path) -> None:
    (repository / "iris/config.pbtxt").write_text('name: "iris" backend: "onnxruntime"')
    given = [f"{name}={repository / place}" for name, place in (("a", "iris"), ("b", "iris/2"))]

    async def served() -> list[tuple[str, str]]:
        manager = ModelManager(settings_of([given[0], f"{given[1]}/model.onnx"]))
        await manager.start()
        rows = [(row["name"], row["version"]) for row in manager.index(ready_only=True)]
        await manager.stop()
        return rows

    assert asyncio.run(served()) == [("a", "10"), ("b", "2")]


def certify(artifact: Path, model: str) -> None:
    """Write the certificate of ``model`` beside its artifact."""
    content = artifact.read_bytes()
    files = {artifact.name: {"sha256": hashlib.sha256(content).hexdigest()}}
    made = {"format": "onnx", "files": files, "size_bytes": len(content)}
    document = {"model": {"name": model}, "artifact": made}
    (artifact.parent / "certificate.json").write_text(json.dumps(document))


def test_a_certified_model_is_served_from_any_folder_and_under_any_name(
    tmp_path: Path, repository: Path
) -> None:
    alone = models.multiply(tmp_path / "out/model.onnx")
    for artifact in (alone, *(repository / "iris").glob("*/model.onnx")):
        certify(artifact, "iris")
    given = [
        str(alone),
        f"b={alone}",
        f"c={repository / 'iris'}",
        f"d={repository}/iris/2/model.onnx",
    ]
    settings = settings_of(given)
    assert [name for name, _ in settings.models] == ["iris", "b", "c", "d"]

    async def served() -> list[tuple[str, str]]:
        manager = ModelManager(settings)
        await manager.start()
        rows = [(row["name"], row["version"]) for row in manager.index(ready_only=True)]
        await manager.stop()
        return rows

    assert asyncio.run(served()) == [("b", "1"), ("c", "10"), ("d", "2"), ("iris", "1")]


def test_a_certificate_of_another_file_or_a_damaged_one_names_nothing(tmp_path: Path) -> None:
    artifact = models.multiply(tmp_path / "out/model.onnx")
    certify(artifact, "iris")
    other = models.multiply(tmp_path / "out/net.onnx")
    assert settings_of([str(other)]).models == (("net", other),)
    for content in ("{", "[]", "{}", '{"model": {"name": 3}}'):
        (tmp_path / "out/certificate.json").write_text(content)
        assert settings_of([str(artifact)]).models == (("out", artifact),)
    certify(artifact, "../x")
    with pytest.raises(InvalidArgument, match="is not a model's name"):
        settings_of([str(artifact)])


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
    assert settings_of([f"one={file}", str(folder)]).models == (("one", file), ("iris", folder))


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
