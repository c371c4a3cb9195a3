"""A wheel for tests, and the files that lock it."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy

_INFO = "own_module-1.0.dist-info"


def write(folder: Path) -> str:
    """Write a wheel, which brings this interpreter's numpy; return its line of a lock file."""
    files = {
        "own_module.py": "VALUE = 42\n",
        "own_module.pth": f"{Path(numpy.__file__).parents[1]}\n",
        f"{_INFO}/METADATA": "Metadata-Version: 2.1\nName: own-module\nVersion: 1.0\n",
        f"{_INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{_INFO}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{_INFO}/RECORD"))
    folder.mkdir(exist_ok=True)
    path = folder / "own_module-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return f"own-module==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def write_project(version: Path, line: str) -> None:
    """Write a ``uv.lock`` of the wheel, with its ``pyproject.toml``."""
    digest = line.rpartition(" --hash=")[2].strip()
    (version / "pyproject.toml").write_text(
        '[project]\nname = "m"\nversion = "0"\nrequires-python = ">=3.11"\n'
        'dependencies = ["own-module"]\n'
    )
    source = 'source = { registry = "https://index.example/simple" }'
    (version / "uv.lock").write_text(
        'version = 1\nrevision = 3\nrequires-python = ">=3.11"\n\n'
        '[[package]]\nname = "m"\nversion = "0"\nsource = { virtual = "." }\n'
        'dependencies = [{ name = "own-module" }]\n'
        '[package.metadata]\nrequires-dist = [{ name = "own-module" }]\n\n'
        f'[[package]]\nname = "own-module"\nversion = "1.0"\n{source}\n'
        'wheels = [{ url = "https://index.example/own_module-1.0-py3-none-any.whl", '
        f'hash = "{digest}" }}]\n'
    )
