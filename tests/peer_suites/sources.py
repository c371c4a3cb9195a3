"""Source trees of the suites, at pinned commits: never a part of this repository."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from modelport.loadtests.system.environments import Missing


class PinnedSource(NamedTuple):
    """A git repository on GitHub, ``owner/name``, and the commit its tests are taken from."""

    repository: str
    commit: str

    @property
    def name(self) -> str:
        return self.repository.split("/")[1]

    @property
    def link(self) -> str:
        return f"https://github.com/{self.repository}/tree/{self.commit}"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "modelport" / "peer-suites"


def checkout(source: PinnedSource, given: Path | None) -> Path:
    """The folder with ``source``: ``given/name`` if the user has it, else a clone in the cache.

    Raises:
        Missing: the folder is not there, is at another commit, or cannot be cloned.
    """
    if given is not None:
        return _given(source, given / source.name)
    folder = cache_folder() / source.name
    if _commit(folder) == source.commit:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _git(folder, "init", "--quiet")
    url = f"https://github.com/{source.repository}"
    _git(folder, "fetch", "--quiet", "--depth", "1", url, source.commit)
    _git(folder, "checkout", "--quiet", "FETCH_HEAD")
    return folder


def _given(source: PinnedSource, folder: Path) -> Path:
    if not folder.is_dir():
        raise Missing(f"{folder} is missing: clone https://github.com/{source.repository} there")
    commit = _commit(folder)
    if commit and commit != source.commit:
        raise Missing(f"{folder} is at {commit[:12]}, but the suite is pinned to {source.commit}")
    return folder


def _commit(folder: Path) -> str:
    """The commit that ``folder`` has checked out; empty: it is no clone."""
    if not (folder / ".git").exists():
        return ""
    return _git(folder, "rev-parse", "HEAD", check=False)


def _git(folder: Path, *arguments: str, check: bool = True) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and check:
        shutil.rmtree(folder, ignore_errors=True)
        raise Missing(
            f"git {arguments[0]} failed: {done.stderr.strip()}; without a network, pass "
            "SOURCES=FOLDER with the clones"
        )
    return done.stdout.strip()
