"""Installation of the environment that a Python model's lock file pins, by ``uv``.

It runs no code of a package: hashes are required, and nothing is built.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from modelport.exporters.runtime.file_errors import writing_to
from modelport.exporters.runtime.temporary_folder import temporary_folder
from modelport.gateway.cli.declared_options import option
from modelport.gateway.cli.paths import WrittenPath
from modelport.gateway.errors import UsageError, first_line
from modelport.gateway.repository import lock_file
from modelport.gateway.repository.lock_file import LockFile

#: Lines that name another file, whose content the hash of the lock file does not cover.
_INCLUDES = re.compile(r"\s*(-r|-c|--requirement|--constraint)\b")
#: The frame of uv's messages.
_FRAME = str.maketrans(dict.fromkeys("\u00d7\u2570\u2500\u25b6\u251c\u2502", ""))

ENVIRONMENTS = option(
    help="Folder of the environments; 'serve' needs the same one.  "
    "[default: in the user's cache folder]",
    type=WrittenPath(),
    metavar="DIR",
)
WHEELS = option(
    help="Install from the wheels in this folder, and from nothing else. Repeatable.",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
)
OFFLINE = option(help="Install from uv's cache, without a network.", is_flag=True)


class InstallSettings(NamedTuple):
    """The folder of the environments, and the sources of what is installed."""

    environments: Path | None
    wheels: Sequence[Path]
    offline: bool

    @property
    def sources(self) -> list[str]:
        """Options of uv."""
        found = ["--offline"] if self.offline or self.wheels else []
        found += ["--no-index"] if self.wheels else []
        return found + [f"--find-links={folder.resolve()}" for folder in self.wheels]


def install(version: Path, settings: InstallSettings) -> Path | None:
    """Install the environment of ``version``, unless it is there; return its folder.

    Returns:
        None: the version has no lock file.

    Raises:
        UsageError: it cannot be installed; the message has uv's reason.
    """
    lock = lock_file.find(version)
    if lock is None:
        _refuse_unpinned(version)
        return None
    place = lock.environment(settings.environments)
    if lock_file.is_installed(place):
        return place
    _check_lines(version, lock)
    with writing_to(place.parent, f"choose another {lock_file.OPTION}"):
        place.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(place.parent) as folder:
            made = folder / "environment"
            _make(version, lock, made, settings)
            try:
                if place.is_dir():  # its interpreter has gone
                    place.rename(folder / "broken")
                made.rename(place)
            except OSError:
                if not lock_file.is_installed(place):  # else another publisher was faster
                    raise
    return place


def _refuse_unpinned(version: Path) -> None:
    name = lock_file.REQUIREMENTS[1]
    if (version / name).exists():
        raise UsageError(
            f"'{name}' pins no hashes, so nothing is installed from it; lock it with 'uv pip "
            f"compile --generate-hashes {name} -o {lock_file.REQUIREMENTS[0]}', or remove it"
        )


def _check_lines(version: Path, lock: LockFile) -> None:
    if lock.name not in lock_file.REQUIREMENTS:
        return
    text = (version / lock.name).read_text(errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        if _INCLUDES.match(line):
            raise UsageError(
                f"'{lock.name}' line {number} includes another file; a lock file is one file, as "
                "'uv pip compile --generate-hashes' writes it"
            )


def _check_current(version: Path, lock: LockFile) -> None:
    """Refuse a ``uv.lock`` that was made for other dependencies than the project has."""
    try:
        read = tomllib.loads((version / lock.name).read_text())
        project = tomllib.loads((version / lock_file.PROJECT).read_text())["project"]
        groups = [
            project.get("dependencies", []),
            *project.get("optional-dependencies", {}).values(),
        ]
        wanted = {_dependency(Requirement(each)) for group in groups for each in group}
        roots = [each for each in read["package"] if "." in each["source"].values()]
        locked = {
            (each["name"], SpecifierSet(each.get("specifier", "")))
            for root in roots
            for each in root.get("metadata", {}).get("requires-dist", [])
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"'{lock.name}' or its {lock_file.PROJECT} cannot be read ({first_line(error)}); lock "
            "again with 'uv lock'"
        ) from error
    if wanted != locked:
        raise UsageError(
            f"'{lock.name}' is of other dependencies than its {lock_file.PROJECT} has; lock again "
            "with 'uv lock'"
        )


def _dependency(requirement: Requirement) -> tuple[str, SpecifierSet]:
    return canonicalize_name(requirement.name), requirement.specifier


def _make(version: Path, lock: LockFile, made: Path, settings: InstallSettings) -> None:
    """Make the environment ``made``."""
    requirements = version / lock.name
    if lock.name == lock_file.UV_LOCK:
        _check_current(version, lock)
        requirements = made.parent / lock_file.REQUIREMENTS[0]
        _uv(
            # With --locked, uv would ask the project's own build about a lock that is out of date.
            lock, version, "export", "--frozen", "--offline", "--no-dev", "--no-emit-project",
            "--format", "requirements.txt", "--output-file", requirements,
        )  # fmt: skip
    _uv(lock, version, "venv", "--no-project", "--relocatable", "--python", sys.executable, made)
    interpreter = made / "bin" / "python3"
    _uv(
        lock, version, "pip", "install", "--python", interpreter, "--require-hashes", "--no-build",
        "--compile-bytecode", *settings.sources, "--requirements", requirements,
    )  # fmt: skip
    # What the worker itself needs.
    if subprocess.run([interpreter, "-I", "-c", "import numpy"], capture_output=True).returncode:
        raise UsageError(
            f"'{lock.name}' has no numpy that can be imported, which every Python model needs; add "
            "it, and lock again"
        )


def _uv(lock: LockFile, version: Path, *arguments: Any) -> None:
    """Run uv with the settings of the version's ``pyproject.toml`` and of the user."""
    beside = Path(sys.executable).parent
    program = shutil.which("uv", path=f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if program is None:
        raise UsageError(f"uv installs what '{lock.name}' pins, and is missing: pip install uv")
    command = [program, "--quiet", "--color", "never", *map(str, arguments)]
    done = subprocess.run(command, cwd=version, capture_output=True, text=True, errors="replace")
    if done.returncode:
        reason = " ".join(done.stderr.translate(_FRAME).split())
        raise UsageError(f"'{lock.name}' cannot be installed: {reason or 'uv has failed'}")
