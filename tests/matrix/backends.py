"""The rows: the demo models in every format, and in front of real servers."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelport.exporters.demo_models import train
from modelport.exporters.loaded_model import Source
from modelport.exporters.packaging.package import package
from modelport.exporters.sources import SourceRequest, reader_selection
from tests import triton_package
from tests.server import Gateway, serving
from tests.torchserve import server as torchserve_server

MODELS = ("fraud", "vit")
EMBEDDED = {
    "ONNX Runtime": "onnx",
    "TorchScript": "torchscript",
    "torch.export": "pt2",
    "SavedModel": "savedmodel",
    "TFLite": "tflite",
}


@dataclass(frozen=True)
class BackendRow:
    """``models``: the demo model's name → what the gateway calls it on this backend."""

    title: str
    models: dict[str, str]


def checkpoints(folder: Path) -> dict[str, Source]:
    """The demo's checkpoints, trained where they are not there yet."""
    trainers = {"fraud": train.train_fraud, "vit": train.train_vit}
    found = {}
    for name in MODELS:
        if not (folder / f"{name}.pt").exists():
            trainers[name](folder / f"{name}.pt")
        found[name] = reader_selection.load(SourceRequest(folder / f"{name}.pt", name))
    return found


def export(checkpoints: Path, repository: Path) -> None:
    """Every format of every model, by the command that users run."""
    for name in MODELS:
        command = [sys.executable, "-m", "modelport", "export", str(checkpoints / f"{name}.pt")]
        command += ["--model", name, "--repository", str(repository)]
        command += [part for format_name in EMBEDDED.values() for part in ("--format", format_name)]
        subprocess.run(command, check=True)


@contextlib.contextmanager
def gateway(work: Path, repository: Path) -> Iterator[tuple[Gateway, list[BackendRow]]]:
    """A gateway in front of everything this matrix has, and its rows."""
    rows = [
        BackendRow(title, {name: f"{name}-{format_name}" for name in MODELS})
        for title, format_name in EMBEDDED.items()
    ]
    with contextlib.ExitStack() as stack:
        torchserve = stack.enter_context(_torchserve(work / "torchserve", repository))
        triton = stack.enter_context(_triton(work / "triton", repository))
        upstream = stack.enter_context(serving(repository))
        remotes = [
            Remote(
                "TorchServe 0.12.0, HTTP",
                "torchserve",
                "http",
                torchserve.inference,
                "-torchscript",
            ),
            Remote(
                "TorchServe 0.12.0, gRPC", "torchserve", "grpc", torchserve.grpc, "-torchscript"
            ),
            Remote("Triton 2.51, HTTP", "triton", "http", triton.http, "-onnx"),
            Remote("Triton 2.51, gRPC", "triton", "grpc", triton.grpc, "-onnx"),
            Remote(
                "TensorFlow Serving's REST", "tfserving", "http", upstream.http_port, "-savedmodel"
            ),
            Remote(
                "TensorFlow Serving's gRPC", "tfserving", "grpc", upstream.grpc_port, "-savedmodel"
            ),
        ]
        routes = work / "modelport.toml"
        with routes.open("w") as file:
            for remote in remotes:
                rows.append(
                    BackendRow(remote.title, {name: remote.called(name) for name in MODELS})
                )
                for name in MODELS:
                    file.write(remote.table(name, repository))
        yield stack.enter_context(serving(repository, "--routes", str(routes))), rows


@dataclass(frozen=True)
class Remote:
    """A server that runs the demo models under their names and ``suffix``."""

    title: str
    backend: str
    protocol: str
    port: int
    suffix: str

    def called(self, name: str) -> str:
        return f"{name}-{self.backend}-{self.protocol}"

    def table(self, name: str, repository: Path) -> str:
        """Its table in ``modelport.toml``."""
        lines = [
            f'[models."{self.called(name)}"]',
            f'backend = "{self.backend}"',
            f'protocol = "{self.protocol}"',
            f'endpoints = ["127.0.0.1:{self.port}"]',
            f'model = "{name}{self.suffix}"',
        ]
        if self.backend == "torchserve":  # it has no metadata
            lines.append(f'config = "{repository}/{name}-torchscript/config.pbtxt"')
        return "\n".join([*lines, "\n"])


@contextlib.contextmanager
def _torchserve(work: Path, repository: Path) -> Iterator[torchserve_server.TorchServePorts]:
    (work / "store").mkdir(parents=True)
    archives = []
    for name in MODELS:
        archives.append(work / "store" / f"{name}-torchscript.mar")
        package(repository / f"{name}-torchscript", "torchserve", archives[-1])
    with torchserve_server.torchserve(work, archives) as ports:
        yield ports


@contextlib.contextmanager
def _triton(work: Path, repository: Path) -> Iterator[triton_package.TritonPorts]:
    """This Triton has the Python backend only: that runs ONNX Runtime."""
    work.mkdir()
    for name in MODELS:
        shutil.copytree(repository / f"{name}-onnx", work / "published" / f"{name}-onnx")
    package(work / "published", "triton", work / "packaged")
    for name in MODELS:
        triton_package.use_python_backend(work / "packaged", f"{name}-onnx")
    with triton_package.tritonserver(work, work / "packaged") as ports:
        yield ports
