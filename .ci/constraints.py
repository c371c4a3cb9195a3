"""Resolve every extra of the project together, and pin what comes out of it in constraints.txt.

Run by ``make constraints`` with the oldest Python that the project supports, since later ones can
install what that can. ``--check 3.12 3.13`` has pip resolve the pins for those Pythons instead, and
installs nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
#: What builds and installs the project itself.
TOOLS = ("pip", "setuptools")
#: Extras without wheels for a Python. ``all`` leaves TensorFlow out by a marker, but pip evaluates
#: markers for the Python that runs it; the other extras are all of ``all``.
UNAVAILABLE = {"3.14": {"tensorflow", "all"}}

HEADER = """\
# Exact versions for every extra: pip install --constraint constraints.txt ".[torch]"
# Written by `make constraints`; do not edit. One file serves all Pythons and systems, whose wheels
# differ, and so do PyTorch's for CUDA and for the CPU alone: so there are no hashes.
"""


def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def resolve(wanted: set[str], *arguments: str) -> dict[str, str]:
    """The version that pip would install of every distribution, by name, the project left out."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet"]
        command += ["--ignore-installed", "--report", str(report), *arguments]
        subprocess.run([*command, *TOOLS, f"{ROOT}[{','.join(sorted(wanted))}]"], check=True)
        rows = [row["metadata"] for row in json.loads(report.read_text())["install"]]
    found = {row["name"].lower().replace("_", "-"): row["version"] for row in rows}
    del found["modelport"]
    return found


def write() -> None:
    # A build of PyTorch for one kind of device has a local version: 2.13.0+cpu.
    found = sorted(resolve(extras()).items())
    pins = (f"{name}=={version.partition('+')[0]}" for name, version in found)
    CONSTRAINTS.write_text(HEADER + "\n".join(pins) + "\n")


def check(version: str) -> None:
    """Fail unless there are wheels of the pinned versions for Python ``version``."""
    for_python = ("--python-version", version, "--only-binary", ":all:", "--target", "unused")
    wanted = extras() - UNAVAILABLE.get(version, set())
    resolve(wanted, "--constraint", str(CONSTRAINTS), *for_python)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", nargs="+", metavar="PYTHON", default=[])
    chosen = parser.parse_args().check
    if not chosen:
        write()
    for python in chosen:
        check(python)
