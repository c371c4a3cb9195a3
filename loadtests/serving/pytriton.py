"""Triton from the wheel ``nvidia-pytriton``, which has the Python backend only.

ONNX files run in ONNX Runtime, under a small Python model (``inside/triton_model.py``).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from modelport.loadtests.serving.gateway import link
from modelport.loadtests.system import environments
from modelport.loadtests.system.environments import ONNXRUNTIME
from modelport.loadtests.system.processes import HOST

VERSION = "0.7.0"  # Triton 2.51
REQUIREMENTS = (f"nvidia-pytriton=={VERSION}", ONNXRUNTIME, "numpy<2")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
#: Triton runs this program in its own environment: it imports nothing from here.
MODEL_PROGRAM = Path(__file__).resolve().parent / "inside" / "triton_model.py"


def command(
    repository: Path, model: str, work: Path, http: int, grpc: int, metrics: int
) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a Triton that serves ``model`` of ``repository``."""
    return serve(onnx_models(repository, [model], work), work, http, grpc, metrics)


def onnx_models(repository: Path, models: Sequence[str], work: Path) -> Path:
    """A copy of ``models`` under ``work``, their ONNX files run by Triton's Python backend."""
    home = work / "models"
    shutil.rmtree(home, ignore_errors=True)
    for model in models:
        shutil.copytree(repository / model, home / model, copy_function=link)
        for onnx in (home / model).glob("*/model.onnx"):
            shutil.copy(MODEL_PROGRAM, onnx.with_name("model.py"))
        file = home / model / "config.pbtxt"
        config = re.sub(
            r"^(platform|default_model_filename|backend):.*\n", "", file.read_text(), flags=re.M
        )
        file.unlink()  # it is a hard link: writing to it would change the original
        file.write_text(config + 'backend: "python"\n')
    return home


def serve(
    models: Path, work: Path, http: int, grpc: int, metrics: int
) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a Triton over a repository for its Python backend."""
    python = environments.venv("triton", *REQUIREMENTS) / "python"
    ask = "import sysconfig as s; print(s.get_path('purelib')); print(s.get_config_var('LIBDIR'))"
    said = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True)
    packages, libraries = said.stdout.split()
    triton = Path(packages) / "pytriton" / "tritonserver"
    flags = {
        "model-repository": models,
        "backend-directory": backends(triton, work),
        "http-address": HOST,
        "http-port": http,
        "grpc-address": HOST,
        "grpc-port": grpc,
        "metrics-address": HOST,
        "metrics-port": metrics,
    }
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    environment = {
        "LD_LIBRARY_PATH": f"{libraries}:{packages}/nvidia_pytriton.libs",
        "PYTHONPATH": packages,
    }
    return [str(triton / "bin" / "tritonserver"), *arguments], environment


def backends(triton: Path, work: Path) -> Path:
    """Triton's backend folder: the Python backend, with the stub for this Python."""
    home = work / "backends"
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(triton / "backends" / "python", home / "python")
    stub = triton / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    shutil.copy(stub, home / "python")
    return home
