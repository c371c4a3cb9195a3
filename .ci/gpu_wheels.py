"""Collect what ``make gpu-check`` needs on a machine without a network, in the folder .gpu-wheels.

    .gpu-wheels/             the base dependencies for CPython 3.12 on Linux, x86-64
    .gpu-onnxruntime/N/      with --onnxruntime-gpu: a piece of its wheel, each small enough to be
                             carried by itself; the first has the ONNX models as well

Versions are those of constraints.txt. PyTorch, with CUDA, and NumPy are the machine's own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEELS, PIECES = ROOT / ".gpu-wheels", ROOT / ".gpu-onnxruntime"
MOST_BYTES = 60 << 20
PIECE_BYTES = 44 << 20
PYTHON = "3.12"
#: pip takes each of these names literally.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17, 12, 5)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)
THE_MACHINES_OWN = ("numpy",)
#: What exports of PyTorch models import besides.
BESIDES = ("safetensors",)
GPU = "onnxruntime-gpu"


def download(folder: Path, *wanted: str, dependencies: bool = True) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", PYTHON]
    command += [flag for name in PLATFORMS for flag in ("--platform", name)]
    command += ["--constraint", str(ROOT / "constraints.txt")]
    command += [] if dependencies else ["--no-deps"]
    subprocess.run([*command, *wanted], check=True)


def base() -> None:
    shutil.rmtree(WHEELS, ignore_errors=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    download(WHEELS, *project["dependencies"], *BESIDES)
    for file in WHEELS.iterdir():
        if re.split(r"[-_]", file.name)[0] in THE_MACHINES_OWN:
            file.unlink()
    size = sum(file.stat().st_size for file in WHEELS.iterdir())
    print(f"{WHEELS.name}: {len(list(WHEELS.iterdir()))} wheels, {size / (1 << 20):.1f} MiB")
    if size > MOST_BYTES:
        sys.exit(f"{WHEELS.name} has more than {MOST_BYTES >> 20} MiB")


def onnxruntime_gpu() -> None:
    shutil.rmtree(PIECES, ignore_errors=True)
    first = PIECES / "0"
    first.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder), GPU, dependencies=False)
        (wheel,) = Path(folder).iterdir()
        count, digest = 0, hashlib.sha256()
        with wheel.open("rb") as file:
            while content := file.read(PIECE_BYTES):
                piece = PIECES / str(count) / f"piece-{count}"
                piece.parent.mkdir(exist_ok=True)
                piece.write_bytes(content)
                digest.update(content)
                count += 1
        about = {"wheel": wheel.name, "sha256": digest.hexdigest(), "pieces": count}
    (first / f"{GPU}.json").write_text(json.dumps(about) + "\n")
    models = [sys.executable, "-m", "tests.gpu_check.onnx", str(first), "fraud", "vit"]
    subprocess.run(models, cwd=ROOT, check=True)
    print(f"{PIECES.name}: {about['wheel']} in {count} pieces")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(f"--{GPU}", action="store_true", dest="gpu", help="its wheel, in pieces")
    chosen = parser.parse_args()
    base()
    if chosen.gpu:
        onnxruntime_gpu()
