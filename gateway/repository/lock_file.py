"""Lock files of Python models, and the places of the environments that they pin.

A lock file lies in the version's folder, where manifest and signature cover it. Its environment
lies outside, because a virtual environment cannot be moved to another machine: ``modelport
publish`` and ``modelport install`` make it, and a load only looks for it.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from pathlib import Path
from typing import NamedTuple

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.storage.mirror import default_cache

#: In order of preference. A ``requirements.txt`` without hashes pins nothing, and is no lock file.
REQUIREMENTS, UV_LOCK = ("requirements.lock", "requirements.txt"), "uv.lock"
PROJECT = "pyproject.toml"
MAX_BYTES = 16 << 20
_HASH = b"--hash="
#: The parameter of a model that names its environment; then its lock file does not count.
PARAMETER = "EXECUTION_ENV_PATH"
OPTION = "--python-environments"


def is_installed(environment: Path) -> bool:
    """Whether an environment is there, with its interpreter."""
    return (environment / "bin" / "python3").is_file()


class LockFile(NamedTuple):
    """The lock file of a version. ``digest``: of everything that decides what is installed."""

    name: str
    digest: str

    def environment(self, folder: Path | None) -> Path:
        """The place of its environment for this interpreter in ``folder``; None: the default."""
        folder = default_cache(OPTION) / "python-environments" if folder is None else folder
        return (
            folder.absolute() / f"{sys.implementation.cache_tag}-{platform.machine()}-{self.digest}"
        )


def find(version: Path) -> LockFile | None:
    """The lock file in the folder of a version, if any.

    Raises:
        InvalidArgument: it cannot be read, or lacks a file that belongs to it.
        IntegrityError: it is too large.
    """
    for name in (REQUIREMENTS[0], UV_LOCK, REQUIREMENTS[1]):
        try:
            content = untrusted_files.read(version / name, MAX_BYTES)
            if name == UV_LOCK:
                content += b"\0" + untrusted_files.read(version / PROJECT, MAX_BYTES)
        except FileNotFoundError as error:
            if error.filename != str(version / PROJECT):
                continue
            raise InvalidArgument(f"'{name}' needs the {PROJECT} that it locks beside it") from None
        except OSError as error:
            raise InvalidArgument(f"'{name}' cannot be read: {error.strerror}") from error
        if name != REQUIREMENTS[1] or _HASH in content:
            return LockFile(name, hashlib.sha256(name.encode() + b"\0" + content).hexdigest())
    return None
