"""Every command that takes a repository takes one in object storage."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from torch import nn

from modelport.cli import modelport
from modelport.exporters.publishing import publish
from modelport.gateway.errors import Unavailable
from modelport.gateway.repository import config
from modelport.gateway.repository.storage.location import Location, Repository
from modelport.gateway.repository.version_choice import VersionChoice
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec
from tests import models
from tests.archives import mar, torchscript
from tests.gateway.repository.storage.moto_server import Moto

pytestmark = pytest.mark.usefixtures("storage_environment")
#: Arguments that name a version, a model or a repository. Those of ``gate`` and ``loadtest`` may be
#: the URLs of servers too, and have a parser of their own.
ARGUMENTS = {
    ("verify", "path"),
    ("publish", "path"),
    ("inspect", "artifact"),
    ("package", "path"),
    ("sample", "path"),
    ("serve", "paths"),
}
#: Options with "repository" in their names that are no repositories.
OTHERS = {("serve", "repository_cache"), ("serve", "repository_poll_seconds")}


def commands(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), name)
            assert found is not None
            yield from commands(found, *path, name)
    else:
        yield path, command


def one_kind_only(command: click.Command) -> list[str]:
    """The parameters for repositories that take only one kind of them."""
    wrong = []
    for path, each in commands(command):
        for parameter in each.params:
            place = (" ".join(path), str(parameter.name))
            flags = "".join(parameter.opts)
            named = "repository" in flags or "model-store" in flags or place in ARGUMENTS
            if named and place not in OTHERS and not isinstance(parameter.type, Repository):
                wrong.append(" ".join(place))
    return wrong


def test_every_parameter_for_a_repository_takes_every_kind() -> None:
    assert one_kind_only(modelport) == []
    known = {
        (" ".join(path), str(parameter.name))
        for path, each in commands(modelport)
        for parameter in each.params
    }
    assert known >= ARGUMENTS | OTHERS


def test_the_check_finds_a_parameter_for_folders_only() -> None:
    @click.command()
    @click.option("--model-repository", type=click.Path(path_type=Path))
    def bad(model_repository: Path) -> None:
        """Known-bad."""

    group = click.Group(commands={"bad": bad})
    assert one_kind_only(group) == ["bad model_repository"]


@pytest.fixture
def repository(moto: Moto, prefix: str) -> Location:
    """A repository with three versions of ``a model``."""
    location = moto.location(prefix)
    tensor = [TensorSpec(name, Datatype.FP32, (4,)) for name in ("x", "y")]
    signature = ModelSignature((tensor[0],), (tensor[1],), 8)
    for version in (1, 2, 3):
        with publish.staging(location) as staged:
            models.multiply(staged / "model.onnx", float(version))
            (staged / "certificate.json").write_text("{}")
            wanted = config.build("a model", config.PLATFORMS[0], signature)
            publish.publish(staged, location, wanted, version)
    return location


def run(*arguments: object) -> Result:
    return CliRunner().invoke(modelport, [str(each) for each in arguments])


def said(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_labels_and_rollbacks(repository: Location, moto: Moto, prefix: str) -> None:
    where = ("--repository", repository)
    said("label", "a model", "stable", 2, *where)
    assert "version 2: stable" in said("label", "a model", *where)
    assert "stable is version 1, was 2" in said("rollback", "a model", "--label", "stable", *where)
    assert "version 2 is served, was 3" in said("rollback", "a model", *where)
    assert "version 3, the newest, is served" in said("rollback", "a model", "--latest", *where)
    said("label", "a model", "stable", "--remove", *where)
    moto.put(f"{prefix}/a model/4/.modelport-claim", b"")
    result = run("label", "a model", "new", 4, *where)
    assert result.exit_code != 0
    assert "has no version 4" in result.output
    result = run("label", "a modell", *where)
    assert "holds no model 'a modell'; did you mean 'a model'?" in result.output
    unknown = Location("s3", "no-such-bucket", endpoint=repository.endpoint)
    assert "no such bucket" in run("label", "m", "--repository", unknown).output


def test_inspect(repository: Location, moto: Moto, prefix: str, tmp_path: Path) -> None:
    models.multiply(tmp_path / "model.onnx")  # as other tools copy a Triton repository
    moto.put(f"{prefix}/plain/1/model.onnx", (tmp_path / "model.onnx").read_bytes())
    for place in (repository / "a model", repository / "a model" / "2", repository / "plain"):
        document = json.loads(said("inspect", place, "--json"))
        assert [tensor["name"] for tensor in document["inputs"]] == ["x"]
    result = run("inspect", repository / "other")
    assert result.exit_code == 2
    assert "neither a published version nor a model" in result.output


@pytest.mark.parametrize("below", ["", "a model", "a model/1"])
def test_package(repository: Location, tmp_path: Path, below: str) -> None:
    place = str(repository / below if below else repository)
    said("package", place, "--for", "triton", "--output", tmp_path / "triton")
    [file] = (tmp_path / "triton").glob("*/*/model.onnx")
    assert file.parts[-3:-1] == ("a model", "1" if below.endswith("1") else "3")


def test_migrate(moto: Moto, prefix: str, tmp_path: Path) -> None:
    weights = torchscript(nn.Linear(4, 2))
    for version in ("1.0", "2.0"):
        mar(tmp_path / f"{version}.mar", "m", {"model.pt": weights}, modelVersion=version)
    where = moto.location(prefix)
    said(
        *("migrate", "torchserve", tmp_path / "1.0.mar", "--repository", where),
        *("--input", "x:FP32[4]", "--output-tensor", "y:FP32[2]"),
    )
    assert "m/1/manifest.json" in moto.keys(prefix)
    said("label", "m", "stable", 1, "--repository", where)
    said(
        *("migrate", "torchserve", tmp_path / "2.0.mar", "--repository", where),
        *("--input", "x:FP32[4]", "--output-tensor", "y:FP32[2]"),
    )
    assert "version 1: stable" in said("label", "m", "--repository", where), "it is kept"


def test_a_version_in_storage_is_never_changed_by_sample(repository: Location) -> None:
    result = run("sample", repository / "a model")
    assert result.exit_code == 2
    assert "name the file to write with --output" in result.output


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["folder", "object storage"])
def test_of_two_processes_that_change_a_configuration_one_reads_it_again(
    repository: Location, tmp_path: Path, place: str
) -> None:
    where: Path | Location = repository
    if place == "folder":
        for version in (1, 2, 3):
            models.multiply(tmp_path / "a model" / str(version) / "model.onnx")
        (tmp_path / "a model" / "config.pbtxt").write_text("")
        where = tmp_path

    def move(label: str) -> None:
        while True:
            choice = VersionChoice.find(where, "a model")
            assert choice is not None
            with contextlib.suppress(Unavailable):
                choice.label(label, 2)
                return

    labels = [f"label{index}" for index in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(move, labels))
    choice = VersionChoice.find(where, "a model")
    assert choice is not None
    assert choice.labels == dict.fromkeys(labels, "2")
