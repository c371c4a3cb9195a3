"""Triton as NVIDIA builds it, from the pytriton wheel, which brings its Python backend only."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from loadtests import environments, tiny_model
from loadtests.peers.servers.base import INSIDE, Command, Launch, Server
from loadtests.processes import HOST

VERSION = "0.7.0"  # Triton 2.51
REQUIREMENTS = (f"nvidia-pytriton=={VERSION}", "onnxruntime", "numpy<2")
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
    """The same model and configuration, the ONNX file run by Triton's Python backend."""
    home = launch.work / "models"
    shutil.rmtree(home, ignore_errors=True)
    version = home / tiny_model.NAME / "1"
    version.mkdir(parents=True)
    shutil.copy(launch.repository / tiny_model.NAME / "1" / "model.onnx", version)
    shutil.copy(INSIDE / "triton_model.py", version / "model.py")
    config = tiny_model.CONFIG.replace('"onnxruntime"', '"python"')
    (home / tiny_model.NAME / "config.pbtxt").write_text(config)
    return home


def command(launch: Launch) -> Command:
    python = environments.venv("triton", *REQUIREMENTS) / "python"
    ask = "import sysconfig as s; print(s.get_path('purelib')); print(s.get_config_var('LIBDIR'))"
    said = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True)
    packages, libraries = said.stdout.split()
    triton = Path(packages) / "pytriton" / "tritonserver"
    flags = {
        "model-repository": models(launch),
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
        "PYTHONPATH": packages,
    }
    return Command([str(triton / "bin" / "tritonserver"), *arguments], env)


SERVER = Server("triton", "2.51, Python backend", command)
