"""Triton as NVIDIA builds it, from the pytriton wheel, which brings its Python backend only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from modelport.loadtests import environments
from modelport.loadtests.peers.servers.base import INSIDE, ONNXRUNTIME, Command, Launch, Server
from modelport.loadtests.processes import HOST

VERSION = "0.7.0"  # Triton 2.51
REQUIREMENTS = (f"nvidia-pytriton=={VERSION}", ONNXRUNTIME, "numpy<2")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def backends(triton: Path, work: Path) -> Path:
    """The backend folder Triton wants: the Python backend with the stub for this Python."""
    home = work / "backends"
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(triton / "backends" / "python", home / "python")
    stub = triton / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    shutil.copy(stub, home / "python")
    return home


def models(launch: Launch) -> Path:
    """The same files and configuration, the ONNX file run by Triton's Python backend."""
    home = launch.work / "models"
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(launch.repository / launch.model, home / launch.model, copy_function=link)
    for onnx in (home / launch.model).glob("*/model.onnx"):
        shutil.copy(INSIDE / "triton_model.py", onnx.with_name("model.py"))
    file = home / launch.model / "config.pbtxt"
    config = re.sub(
        r"^(platform|default_model_filename|backend):.*\n", "", file.read_text(), flags=re.M
    )
    file.unlink()  # a link: what is written to it would change the others' too
    file.write_text(config + 'backend: "python"\n')
    return home


def link(source: str, target: str) -> None:
    """Large files are not copied, where one file system holds both."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def command(launch: Launch) -> Command:
    return serve(launch, models(launch))


def serve(launch: Launch, models: Path) -> Command:
    """A tritonserver over a repository of models for its Python backend."""
    python = environments.venv("triton", *REQUIREMENTS) / "python"
    ask = "import sysconfig as s; print(s.get_path('purelib')); print(s.get_config_var('LIBDIR'))"
    said = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True)
    packages, libraries = said.stdout.split()
    triton = Path(packages) / "pytriton" / "tritonserver"
    flags = {
        "model-repository": models,
        "backend-directory": backends(triton, launch.work),
        "http-address": HOST,
        "http-port": launch.http,
        "grpc-address": HOST,
        "grpc-port": launch.grpc,
        "metrics-address": HOST,
        "metrics-port": launch.metrics,
    }
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    env = {
        "LD_LIBRARY_PATH": f"{libraries}:{packages}/nvidia_pytriton.libs",
        "PYTHONPATH": f"{packages}:{INSIDE}",
    }
    return Command([str(triton / "bin" / "tritonserver"), *arguments], env)


# Its processes lock memory that they share and abort when a lock takes more than 10 seconds, as one
# does whose holder is stopped. Idle it takes next to nothing of the core.
SERVER = Server("triton", "2.51, Python backend", command, perf_analyzer=True, stoppable=False)
