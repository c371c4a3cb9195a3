"""Folders that hold more than files are refused, in one line and in time."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from modelport.cli import modelport
from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import manifest, standalone_model, untrusted_files
from modelport.gateway.repository.artifact_checks import saved_model_guard
from tests.attacks import hostile_graphs
from tests.attacks.test_hostile_artifacts import LINE, HostileRepository, _multiply


def nested(folder: Path, levels: int) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("a", dir_fd=descriptor)
        below = os.open("a", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)


def replace_with_pipe(version: Path, name: str) -> None:
    (version / name).unlink()
    os.mkfifo(version / name)


def replace_with_link(version: Path, name: str, target: str) -> None:
    (version / name).unlink()
    (version / name).symlink_to(target)


#: What is done to an honest version, and what the refusal names.
FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a hundred folders in one another": (lambda v: nested(v, 100), "levels deep"),
    "5,000 folders in one another": (lambda v: nested(v, 5000), "levels deep"),
    "a link to its own folder": (lambda v: (v / "loop").symlink_to("."), "not listed"),
    "a link to itself": (lambda v: (v / "loop").symlink_to("loop"), "not listed"),
    "a pipe": (lambda v: os.mkfifo(v / "pipe"), "not listed"),
    "a pipe as the artifact": (lambda v: replace_with_pipe(v, "model.onnx"), "model.onnx"),
    "a pipe as the manifest": (lambda v: replace_with_pipe(v, "manifest.json"), "not a regular"),
    "a device as the artifact": (
        lambda v: replace_with_link(v, "model.onnx", "/dev/zero"),
        "model.onnx",
    ),
    "a device as the manifest": (
        lambda v: replace_with_link(v, "manifest.json", "/dev/zero"),
        "not a regular",
    ),
    "a terabyte as the manifest": (
        lambda v: os.truncate(v / "manifest.json", 1 << 40),
        "larger than",
    ),
    "a terabyte as the certificate": (
        lambda v: os.truncate(v / "certificate.json", 1 << 40),
        "certificate.json",
    ),
}


@pytest.fixture
def repository(tmp_path: Path) -> HostileRepository:
    made = HostileRepository(tmp_path / "repository")
    made.put("model.onnx", _multiply(), LINE)
    made.certify("onnx")
    return made


@pytest.mark.parametrize("what", FOLDERS)
def test_a_version_that_holds_more_than_files_is_not_verified(
    what: str, repository: HostileRepository
) -> None:
    spoil, reason = FOLDERS[what]
    spoil(repository.version)
    try:
        result = CliRunner().invoke(modelport, ["verify", str(repository.version), "--integrity"])
        assert result.exit_code == 5, result.output
        assert reason in result.stderr
        assert len(result.stderr.splitlines()) == 1
        with pytest.raises(Exception, match=r"\w"):
            repository.serve()
    finally:
        subprocess.run(["rm", "-rf", repository.version], check=True)


def test_an_honest_version_is_verified(repository: HostileRepository) -> None:
    result = CliRunner().invoke(modelport, ["verify", str(repository.version), "--integrity"])
    assert result.exit_code == 0, result.output
    nested(repository.version, 10)
    repository.certify("onnx")
    assert set(manifest.files_of(repository.version)) == {"model.onnx", "certificate.json"}


def test_files_without_number_are_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untrusted_files, "MAX_FILES", 10)
    for number in range(11):
        (tmp_path / str(number)).touch()
    with pytest.raises(IntegrityError, match="more than 10 files"):
        list(untrusted_files.below(tmp_path))


def test_a_saved_model_of_a_gigabyte_of_nothing_costs_no_memory(tmp_path: Path) -> None:
    folder = hostile_graphs.saved_model(tmp_path / "model.savedmodel", lambda meta: "")
    os.truncate(folder / saved_model_guard.FILENAME, 1 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(IntegrityError, match="larger than"):
        saved_model_guard.check(folder)
    result = CliRunner().invoke(modelport, ["inspect", str(folder)])
    assert result.exit_code == 5, result.output
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_a_saved_model_with_folders_without_end_is_not_served_alone(tmp_path: Path) -> None:
    folder = hostile_graphs.saved_model(tmp_path / "model", lambda meta: "")
    nested(folder, 2000)
    try:
        with pytest.raises(IntegrityError, match="levels deep"):
            standalone_model.scan(folder, "m")
        ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
        command = [sys.executable, "-m", "modelport", "serve", str(folder), *ports]
        served = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert served.returncode not in (0, 1), served
        listening, error = served.stderr.splitlines()
        assert "listening" in listening
        assert error.startswith(f"modelport: error: '{folder}' cannot be served")
        assert "levels deep" in error
    finally:
        subprocess.run(["rm", "-rf", folder], check=True)
