"""A published version is whole or absent, whoever dies, races or runs out of room."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from modelport.exporters.publishing import contract, publish
from modelport.gateway.errors import AlreadyExists, IntegrityError, UsageError
from modelport.gateway.repository import config, manifest
from modelport.gateway.repository.scan import scan
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec

NURSERY = str(Path(__file__).with_name("nursery.py"))
Python = Callable[..., subprocess.CompletedProcess[str]]
Snapshot = Callable[[Path], dict[str, str]]


def wanted(name: str = "m", batch: int = 8, width: int = 4) -> config.ModelConfig:
    tensor = TensorSpec("x", Datatype.FP32, (width,))
    return config.build(name, config.PLATFORMS[0], ModelSignature((tensor,), (tensor,), batch))


def put(
    repository: Path, wanted_config: config.ModelConfig | None = None, version: int | None = None
) -> contract.PublishedVersion:
    with publish.staging(repository) as staged:
        (staged / "model.onnx").write_bytes(b"onnx")
        return publish.publish(staged, repository, wanted_config or wanted(), version)


def visible(repository: Path) -> list[Path]:
    """Every version that a reader of the repository would find."""
    return [path for path in repository.glob("[!.]*/*") if path.name.isdigit()]


def partial(repository: Path) -> list[str]:
    """The visible versions that are not whole, and why."""
    broken = []
    for version in visible(repository):
        try:
            config.parse((version.parent / config.FILENAME).read_text())
            if not manifest.verify(version):
                broken.append(f"{version}: no manifest")
        except (OSError, IntegrityError) as error:
            broken.append(f"{version}: {error}")
    return broken


def run(python: Python, *arguments: str) -> Any:
    result = python(NURSERY, *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "repository"


def test_a_publisher_killed_at_every_single_step_leaves_no_partial_version(
    python: Python, repository: Path
) -> None:
    killed = run(python, "every_step", str(repository), "properly")
    assert killed >= 30
    assert partial(repository) == []
    assert put(repository, wanted("model0")).version == 1
    assert not list(repository.glob(".*")), "what the dead left was not swept away"


def test_a_publisher_that_writes_in_place_is_caught_by_the_same_killing(
    python: Python, repository: Path
) -> None:
    assert run(python, "every_step", str(repository), "in_place") > 5
    assert partial(repository) != []


@pytest.mark.thorough
def test_publishers_killed_at_random_moments_leave_no_partial_version(
    python: Python, repository: Path
) -> None:
    assert run(python, "random", str(repository), "60") == 60
    assert len(visible(repository)) > 5 + 10
    assert partial(repository) == []
    put(repository)
    assert not list(repository.glob(".*"))


def test_racing_publishers_get_a_number_each(python: Python, repository: Path) -> None:
    assert run(python, "race", str(repository), "6", "5", "0") == [0] * 6
    assert sorted(int(path.name) for path in visible(repository)) == list(range(1, 31))
    assert partial(repository) == []
    assert not list(repository.glob(".*"))


def test_of_publishers_racing_for_one_number_one_wins(python: Python, repository: Path) -> None:
    codes = run(python, "race", str(repository), "6", "1", "7")
    assert sorted(codes) == [0, 17, 17, 17, 17, 17]
    assert [path.name for path in visible(repository)] == ["7"]
    assert partial(repository) == []


def test_a_new_model_gets_its_configuration_and_a_manifest(repository: Path) -> None:
    assert put(repository) == contract.PublishedVersion("m", 1, repository / "m" / "1")
    assert manifest.verify(repository / "m" / "1")
    text = (repository / "m" / config.FILENAME).read_text()
    assert config.signature(config.parse(text)).max_batch_size == 8
    assert (repository / "m").stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_known_model_keeps_the_configuration_its_operator_edited(repository: Path) -> None:
    put(repository)
    path = repository / "m" / config.FILENAME
    edited = path.read_text() + "\ninstance_group { count: 2 kind: KIND_CPU }\n# by hand\n"
    path.write_text(edited)
    assert put(repository).version == 2
    assert path.read_text() == edited


def picture(mean: str) -> config.ModelConfig:
    found = wanted()
    found.parameters["image.mean"].string_value = mean
    return found


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (wanted(batch=4), r"max_batch_size is 8 there and 4 here;"),
        (wanted(width=5), r"'\w+' is FP32\[\w+\] there and FP32\[5\] here"),
        (picture("0.5"), "image.mean is absent there and 0.5 here;"),
    ],
    ids=["batch", "width", "pictures"],
)
def test_another_signature_is_refused_by_its_difference_and_nothing_changes(
    repository: Path, snapshot: Snapshot, other: config.ModelConfig, said: str
) -> None:
    put(repository)
    before = snapshot(repository)
    with pytest.raises(UsageError, match=f"contradicts this export: .*{said}"):
        put(repository, other)
    assert snapshot(repository) == before


def test_an_existing_version_is_never_overwritten(repository: Path, snapshot: Snapshot) -> None:
    put(repository, version=3)
    before = snapshot(repository)
    with pytest.raises(AlreadyExists, match="version 3 of 'm' is published and never overwritten"):
        put(repository, version=3)
    assert snapshot(repository) == before
    assert put(repository).version == 4
    assert put(repository, version=1).version == 1


def test_an_empty_version_folder_is_not_replaced_either(repository: Path) -> None:
    put(repository)
    (repository / "m" / "2").mkdir()
    with pytest.raises(AlreadyExists):
        put(repository, version=2)
    assert put(repository).version == 3


def test_an_empty_model_folder_is_taken_for_a_new_model(repository: Path) -> None:
    (repository / "m").mkdir(parents=True)
    assert put(repository).version == 1
    assert (repository / "m" / config.FILENAME).exists()


@pytest.mark.parametrize("content", ["a file", "a folder", "a broken configuration", "a link"])
def test_something_else_under_the_models_name_is_a_usage_error(
    repository: Path, tmp_path: Path, content: str
) -> None:
    repository.mkdir()
    if content == "a file":
        (repository / "m").write_text("")
    elif content == "a link":
        (repository / "m").symlink_to(tmp_path / "nowhere")
    else:
        (repository / "m").mkdir()
        name = config.FILENAME if content == "a broken configuration" else "notes.txt"
        (repository / "m" / name).write_text("{{{")
    with pytest.raises(UsageError, match=r"use\s+another --name"):
        put(repository)
    assert not list(repository.glob(".*"))


def test_a_failure_leaves_nothing_behind_not_even_the_repository(tmp_path: Path) -> None:
    repository = tmp_path / "new" / "repository"
    with contextlib.suppress(RuntimeError), publish.staging(repository) as staged:
        (staged / "model.onnx").write_bytes(b"half")
        raise RuntimeError("the exporter died")
    assert list(tmp_path.iterdir()) == []


def test_an_artifact_that_is_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for content in ("old", "new"):
        with publish.staging(tmp_path) as staged:
            (staged / "model.savedmodel").mkdir()
            (staged / "model.savedmodel" / content).touch()
            (staged / "certificate.json").write_text(content)
            publish.deliver(staged, tmp_path)
    assert [path.name for path in (tmp_path / "model.savedmodel").iterdir()] == ["new"]
    assert (tmp_path / "certificate.json").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2


def test_the_staging_of_a_living_publisher_is_left_alone(repository: Path) -> None:
    with publish.staging(repository) as staged:
        (staged / "model.onnx").write_bytes(b"onnx")
        assert put(repository).version == 1
        assert publish.publish(staged, repository, wanted(), None).version == 2


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """No file of this process may grow past 4 KiB: a full disk, without filling one.

    Within the test only: pytest's own output may be a file as well.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    with (
        pytest.raises(OSError, match="File too large"),
        publish.staging(repository) as staged,
        small_files(),
    ):
        (staged / "model.onnx").write_bytes(bytes(10_000))
    assert not repository.exists()


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "a\\b", "a" * 256, "a\n"])
def test_a_name_that_is_no_model_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a model name"):
        contract.check_name(name)


@pytest.mark.parametrize("text", ["0", "-1", "01", "1.0", "x", "", " 1", "٣", "9" * 20])
def test_a_version_that_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a version"):
        contract.parse_version(text)


def test_auto_and_numbers_are_versions() -> None:
    assert contract.parse_version("auto") is None
    assert contract.parse_version("12") == 12


@pytest.mark.parametrize("number", [10**18, 2**63 - 1])
def test_a_version_of_19_digits_that_is_published_is_found(repository: Path, number: int) -> None:
    assert contract.parse_version(str(number)) == number
    assert put(repository, version=number).version == number
    assert list(scan([repository])["m"].versions) == [number]


@pytest.mark.parametrize("number", [2**63, 10**19 - 1, 10**19])
def test_a_version_beyond_64_bits_is_neither_published_nor_found(
    repository: Path, number: int
) -> None:
    put(repository)
    with pytest.raises(UsageError):
        contract.parse_version(str(number))
    with pytest.raises(UsageError):
        put(repository, version=number)
    (repository / "m" / str(number)).mkdir()
    assert list(scan([repository])["m"].versions) == [1]
