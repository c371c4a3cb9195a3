"""Cached environments for tools and peers, in `.peers/` of a checkout or in the user's cache.

Each environment is made once and reused while its requirements stay the same. This module imports
only the standard library: a fresh machine starts with Python, apt and pip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
    run([sys.executable, "-m", "venv", str(home)])
    flags = [] if dependencies else ["--no-deps"]
    python = str(home / "bin" / "python")
    run([python, "-m", "pip", "install", "--quiet", *flags, *requirements])
    marker.write_text(wanted)
    return home / "bin"


def failure_of(command: list[str], cwd: Path) -> str:
    """Run a command; return its output if it fails, otherwise an empty string."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr or done.stdout).strip()[-500:]


def run(command: list[str]) -> None:
    """Run a command that must succeed; raise ``Missing`` with its output."""
    if error := failure_of(command, ROOT):
        raise Missing(f"{' '.join(command)} failed: {error}")
