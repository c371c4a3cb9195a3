"""Resolve every extra of the project together, and pin what comes out of it in constraints.txt.

The images install from ``deploy/docker/requirements``, which has the same versions with hashes. Run
by ``make constraints`` with the oldest Python that the project supports, since later ones can
install what that can. ``--check 3.12 3.13`` has pip resolve the pins for those Pythons instead, and
installs nothing; ``--hashes`` writes the hashes of the pins again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST = "3.11"
#: What builds and installs the project itself.
TOOLS = ("pip", "setuptools", "uv")
#: Extras without wheels for a Python. ``all`` leaves TensorFlow out by a marker, but pip evaluates
#: markers for the Python that runs it; the other extras are all of ``all``.
UNAVAILABLE = {"3.14": {"tensorflow", "all"}}

HEADER = """\
# Exact versions for every extra: pip install --constraint constraints.txt ".[torch]"
# Written by `make constraints`; do not edit. There are no hashes, because PyTorch's wheels for CUDA
# and for the CPU alone differ; deploy/docker/requirements has those of the images' other files.
"""
REQUIREMENTS = ROOT / "deploy" / "docker" / "requirements"
#: A file of hashed requirements → its extras, and the files whose requirements it leaves out.
IMAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "onnx": (("images", "jwt"), ()),
    "s3": (("s3",), ("onnx",)),
    "gcs": (("gcs",), ("onnx",)),
    "azure": (("azure",), ("onnx",)),
    "gpu": (("gpu",), ("onnx",)),
    "litert": (("litert",), ("onnx",)),
    "tensorflow": (("tensorflow",), ("litert",)),
    "torch": (("torch",), ("onnx",)),
    "huggingface": (("huggingface",), ("torch",)),
    "all": (("all",), ("huggingface", "tensorflow")),
}
#: Comes from PyTorch's own index, whose wheel for the CPU alone has another hash.
UNHASHED = "torch"
HASHES_HEADER = """\
# Written by `make constraints`; do not edit. The hashes are those of all platforms' files.
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


def write_hashes() -> None:
    """Write the requirements of the images, with the hashes of every file that PyPI has."""
    pinned = CONSTRAINTS.read_text().splitlines()
    # uv writes names in their normal form.
    pins = {re.sub(r"[-_.]+", "-", line.partition("==")[0]) for line in pinned}
    lines: dict[str, dict[str, str]] = {}
    for name, (wanted, parents) in IMAGES.items():
        inherited = {known for parent in parents for known in _inherited(lines, parent)}
        found = _hashed({"images", "jwt", *wanted, *_extras(parents)})
        # What else PyTorch's wheel for CUDA needs has no pin.
        kept = pins - {UNHASHED} - inherited
        lines[name] = {each: text for each, text in found.items() if each in kept}
        # What takes the place of another distribution is installed when that one is gone.
        included = "".join(f"-r {parent}.txt\n" for parent in parents if name != "gpu")
        REQUIREMENTS.mkdir(exist_ok=True)
        content = HASHES_HEADER + included + "".join(lines[name].values())
        (REQUIREMENTS / f"{name}.txt").write_text(content)


def _extras(names: tuple[str, ...]) -> set[str]:
    return {extra for name in names for extra in {*IMAGES[name][0], *_extras(IMAGES[name][1])}}


def _inherited(lines: dict[str, dict[str, str]], name: str) -> set[str]:
    return {*lines[name], *(each for p in IMAGES[name][1] for each in _inherited(lines, p))}


def _hashed(wanted: set[str]) -> dict[str, str]:
    """The requirement of every distribution that these extras need, with its hashes, by name."""
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes"]
    command = [sys.executable, "-m", *command, "--no-header", "--no-annotate"]
    command += ["--no-emit-index-url", "--no-emit-find-links", "--no-config"]
    command += ["--python-version", OLDEST, "--constraint", str(CONSTRAINTS)]
    command += [flag for extra in sorted(wanted) for flag in ("--extra", extra)]
    done = subprocess.run(
        [*command, str(ROOT / "pyproject.toml")], check=True, capture_output=True, text=True
    )
    texts = re.findall(r"^[a-z0-9._-]+==.*(?:\n .*)*\n", done.stdout, re.MULTILINE)
    return {text.partition("==")[0]: text for text in texts}


def check(version: str) -> None:
    """Fail unless there are wheels of the pinned versions for Python ``version``."""
    for_python = ("--python-version", version, "--only-binary", ":all:", "--target", "unused")
    wanted = extras() - UNAVAILABLE.get(version, set())
    resolve(wanted, "--constraint", str(CONSTRAINTS), *for_python)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", nargs="+", metavar="PYTHON", default=[])
    parser.add_argument("--hashes", action="store_true")
    chosen = parser.parse_args()
    if not chosen.check and not chosen.hashes:
        write()
    if not chosen.check:
        write_hashes()
    for python in chosen.check:
        check(python)
