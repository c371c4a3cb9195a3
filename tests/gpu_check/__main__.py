"""Serve models on a GPU, compare each answer with the CPU's, and print one table.

    make gpu-check ARGS="--device cpu --models fraud vit --seconds 900"

It runs on a bare machine: Python 3.12, PyTorch with CUDA, NumPy, a C++ compiler and this checkout,
without a network. Whatever else it needs comes from the wheels that ``make gpu-wheels`` collects. A
failed check does not end the others; the exit status is then 1. Without a GPU it says "not run",
and exits with 0. ``$OUT/gpu-check.json``, or ``build/gpu-check.json``, has the details.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WHEELS, PIECES = ROOT / ".gpu-wheels", ROOT / ".gpu-onnxruntime"
#: Of the whole program; a check that would begin later is left out by name.
SECONDS = 360.0
#: The machine's own; wheels of them are not installed over it.
FROM_THE_MACHINE = ("torch-", "numpy-")


def installed(wheels: Path, into: Path, *skipped: str) -> None:
    """Install the wheels of a folder, without a network, into a folder of their own."""
    files = [str(file) for file in wheels.glob("*.whl") if not file.name.startswith(skipped)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-compile", "--target", str(into), *files], check=True)


def why_not(device: str) -> str:
    """The reason why nothing can be checked here; empty if it can."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no GPU"
    return ""


def machine(device: str) -> dict[str, Any]:
    import torch

    on_gpu = device == "cuda"
    return {
        "device": torch.cuda.get_device_name(0) if on_gpu else platform.processor() or "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "cores": os.cpu_count(),
    }


def write(document: dict[str, Any]) -> None:
    folder = Path(os.environ.get("OUT") or ROOT / "build")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu-check.json").write_text(json.dumps(document, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.gpu_check", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="fewer of them")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all checks together")
    parser.add_argument("--wheels", type=Path, default=WHEELS, metavar="FOLDER")
    parser.add_argument(
        "--onnxruntime", type=Path, default=PIECES, metavar="FOLDER", help="pieces of its wheel"
    )
    parser.add_argument("--installed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    started = time.monotonic()
    reason = why_not(options.device)
    if reason:
        print(f"gpu-check: not run: {reason}")
        write({"result": "not run", "reason": reason})
        return 0
    if not options.installed and options.wheels.is_dir():
        with tempfile.TemporaryDirectory(prefix="modelport-gpu-site-") as site:
            installed(options.wheels, Path(site), *FROM_THE_MACHINE)
            path = os.pathsep.join(filter(None, (site, str(ROOT), os.environ.get("PYTHONPATH"))))
            command = [sys.executable, "-m", "tests.gpu_check", *sys.argv[1:], "--installed"]
            return subprocess.run(
                command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}
            ).returncode
    from tests.gpu_check import checks, subjects

    unknown = sorted(set(options.models or ()) - set(subjects.MODELS))
    if unknown:
        parser.error(f"no model {unknown}; --models takes: {', '.join(subjects.MODELS)}")
    with tempfile.TemporaryDirectory(prefix="modelport-gpu-") as folder:
        models = options.models or checks.MODELS[options.device]
        end = started + options.seconds
        rows = checks.run(Path(folder), options.device, models, options.onnxruntime, end)
    wrong = [row for row in rows if row.verdict == "FAIL"]
    about = machine(options.device)
    print(f"\n{about['device']}, PyTorch {about['torch']}, Python {about['python']}")
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"{row.verdict:7} {row.name:{width}} {row.seconds:6.1f} s  {row.text}")
    print(
        f"gpu-check: {len(wrong)} of {len(rows)} checks failed, {time.monotonic() - started:.0f} s"
    )
    write({"result": "failed" if wrong else "passed", "machine": about} | checks.document(rows))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
