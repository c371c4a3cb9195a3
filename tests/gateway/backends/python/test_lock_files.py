"""Environments of lock files: installed when a version is published, and never by a load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from modelport.cli import modelport
from modelport.exporters.publishing import python_environment
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import lock_file
from tests.gateway.backends.python import python_models, wheels
from tests.gateway.backends.python.asking import ask, control
from tests.server import serving

CODE = "import own_module\nreturn [reply(own_module.VALUE)]"


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version without a lock file, beside a folder ``wheels``."""
    return python_models.coded(tmp_path / "source", "act")


def run(tmp_path: Path, command: str, *arguments: str | Path) -> Result:
    """Run a command with relative paths, as users do."""
    environments, wheels = (os.path.relpath(tmp_path / name) for name in ("environments", "wheels"))
    options = ["--python-environments", environments, "--wheels", wheels]
    return CliRunner().invoke(modelport, [str(each) for each in (command, *arguments, *options)])


def publish(tmp_path: Path, version: Path, *arguments: str | Path) -> Result:
    return run(tmp_path, "publish", version, "--repository", tmp_path / "repository", *arguments)


def test_a_published_lock_file_gives_the_model_its_environment(
    tmp_path: Path, version: Path
) -> None:
    (version / "requirements.lock").write_text(wheels.write(tmp_path / "wheels"))
    CliRunner().invoke(modelport, ["keygen", "--output", str(tmp_path / "mine")])
    done = publish(tmp_path, version, "--sign-key", tmp_path / "mine.key")
    assert done.exit_code == 0, done.output
    repository, environments = tmp_path / "repository", tmp_path / "environments"
    (environment,) = environments.iterdir()
    assert str(environment) in done.output
    flags = (
        "--require-signature", str(tmp_path / "mine.pub"), "--model-control-mode", "explicit",
        "--python-environments", str(environments),
    )  # fmt: skip
    with serving(repository, *flags) as gateway:
        assert control(gateway, "act") == ""
        assert ask(gateway, CODE)[1]["outputs"][0]["data"] == [42.0]
        (environment / "bin" / "python3").unlink()
        assert control(gateway, "act", "unload") == ""
        missing = control(gateway, "act")
        assert "environment that 'requirements.lock' pins is not installed" in missing
        assert "modelport install" in missing
        assert str(tmp_path) not in missing
        assert not (environment / "bin" / "python3").exists()
        installed = run(tmp_path, "install", repository)
        assert installed.exit_code == 0, installed.output
        assert control(gateway, "act") == ""
        lock = repository / "act" / "1" / "requirements.lock"
        lock.write_text(lock.read_text() + "\n")
        assert control(gateway, "act", "unload") == ""
        assert "'requirements.lock'" in control(gateway, "act")
    assert run(tmp_path, "install", repository).exit_code == 5


def test_a_uv_lock_is_installed_from_wheels(tmp_path: Path, version: Path) -> None:
    wheels.write_project(version, wheels.write(tmp_path / "wheels"))
    done = publish(tmp_path, version)
    assert done.exit_code == 0, done.output
    (environment,) = (tmp_path / "environments").iterdir()
    assert [*environment.glob("lib/*/site-packages/own_module.py")]
    with (version / "pyproject.toml").open("a") as project:
        project.write('[project.optional-dependencies]\nextra = ["another"]\n')
    refused = publish(tmp_path, version)
    assert refused.exit_code == 2
    assert "'uv.lock' is of other dependencies than its pyproject.toml" in refused.output
    assert len([*(tmp_path / "environments").iterdir()]) == 1


BUILD = """
def get_requires_for_build_editable(settings):
    open({path!r}, "w")
    return []
get_requires_for_build_wheel = get_requires_for_build_editable
"""


def test_an_installation_runs_no_code_of_the_version(
    tmp_path: Path, version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv asks the build of a project that differs from its lock file, unless it must not."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    wheels.write_project(version, wheels.write(tmp_path / "wheels"))
    project = (version / "pyproject.toml").read_text().replace("version =", "# version =")
    (version / "pyproject.toml").write_text(
        project.replace("[project]", '[project]\ndynamic = ["version"]')
        + '[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n'
    )
    ran = tmp_path / "ran"
    (version / "own.py").write_text(BUILD.format(path=str(ran)))
    publish(tmp_path, version)
    assert not ran.exists()
    shutil.rmtree(tmp_path / "environments")
    with monkeypatch.context() as patch:  # the known-bad variant
        run_uv = python_environment._uv
        patch.setattr(
            python_environment,
            "_uv",
            lambda *given: run_uv(*("--locked" if each == "--frozen" else each for each in given)),
        )
        publish(tmp_path, version)
    assert ran.exists()


REFUSED = {
    "another hash": ("own-module==1.0 --hash=sha256:" + "0" * 64, "Hash mismatch"),
    "no hash": ("own-module==1.0", "hash"),
    "another file": ("-r other.txt\n", "'requirements.lock' line 1 includes another file"),
    "no such wheel": ("absent==1.0 --hash=sha256:" + "0" * 64, "absent"),
    "no numpy": ("", "has no numpy that can be imported"),
    "no requirements": ("\x00\x01", "'requirements.lock' cannot be installed"),
}


@pytest.mark.parametrize(
    "case", [each if n < 3 else pytest.param(each, marks=pytest.mark.thorough)
             for n, each in enumerate(REFUSED)]
)  # fmt: skip
def test_what_cannot_be_installed_is_not_published(
    tmp_path: Path, version: Path, case: str
) -> None:
    wheels.write(tmp_path / "wheels")
    text, reason = REFUSED[case]
    (version / "requirements.lock").write_text(text)
    done = publish(tmp_path, version)
    assert done.exit_code == 2, done.output
    assert len(done.output.splitlines()) == 1
    assert reason in done.output
    assert not (tmp_path / "repository").exists()
    assert not [*tmp_path.glob("environments/*")]


def test_requirements_without_hashes_are_no_lock_file(tmp_path: Path, version: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (version / "requirements.txt").write_text("numpy\n")
    done = publish(tmp_path, version)
    assert done.exit_code == 2
    assert "--generate-hashes requirements.txt -o requirements.lock" in done.output
    assert lock_file.find(version) is None
    assert (
        "no version of a Python model with a lock file"
        in run(tmp_path, "install", version.parent).output
    )


def test_an_environment_that_the_model_names_is_its_only_one(tmp_path: Path) -> None:
    parameter = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/opt/env" } }'
    version = python_models.coded(tmp_path / "source", "act", parameter)
    (tmp_path / "wheels").mkdir()
    for name, line in (("requirements.txt", "numpy"), ("requirements.lock", "a --hash=sha256:0")):
        (version / name).write_text(line)
        done = publish(tmp_path, version)
        assert done.exit_code == 0, done.output
    assert not (tmp_path / "environments").exists()


def test_the_environment_depends_on_every_file_that_locks_it(tmp_path: Path) -> None:
    names = ("requirements.lock", "uv.lock", "pyproject.toml", "requirements.txt")
    for name in names:
        (tmp_path / name).write_text("a --hash=sha256:b")
    seen = set()
    for _ in range(3):
        lock = lock_file.find(tmp_path)
        assert lock is not None
        seen.add(lock.environment(tmp_path))
        if lock.name == "uv.lock":
            (tmp_path / "pyproject.toml").write_text("changed")
            changed = lock_file.find(tmp_path)
            assert changed is not None
            seen.add(changed.environment(tmp_path))
        (tmp_path / lock.name).unlink()
    assert len(seen) == 4
    assert lock_file.find(tmp_path) is None
    (tmp_path / "uv.lock").write_text("")
    (tmp_path / "pyproject.toml").unlink()
    with pytest.raises(InvalidArgument, match=r"pyproject\.toml"):
        lock_file.find(tmp_path)
