"""Triton at its own ports.

The backends of a ``tritonserver`` on PATH run the output of ``modelport package``. The wheel
``nvidia-pytriton`` has the Python backend only, which runs ONNX files in ONNX Runtime.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.serving import pytriton
from modelport.loadtests.serving.server import MeasuredServerLaunch, get
from modelport.loadtests.system import environments
from modelport.loadtests.system.environments import Missing
from modelport.loadtests.system.processes import HOST, free_ports

OIP = (LoadTestProtocol.OIP_HTTP, LoadTestProtocol.OIP_HTTP_BINARY, LoadTestProtocol.TRITON_HTTP)
GRPC = (LoadTestProtocol.OIP_GRPC, LoadTestProtocol.TRITON_GRPC)


def program() -> str:
    """``tritonserver`` on PATH; empty: the wheel's, in a cached environment.

    Raises:
        Missing: neither is available.
    """
    found = shutil.which("tritonserver")
    if found is None:
        environments.venv("triton", *pytriton.REQUIREMENTS)
    return found or ""


@dataclass(frozen=True)
class Triton:
    """Triton with one model; ``package`` is a repository of ``modelport package --for triton``."""

    package: Path
    model: str
    program: str = ""

    def launch(self, work: Path) -> MeasuredServerLaunch:
        http, grpc, metrics = free_ports(3)
        if self.program:
            command, env = self._installed(http, grpc, metrics)
        else:
            folder = self.package / self.model
            if not any(folder.glob("*/model.onnx")):
                raise Missing("the Triton of the wheel nvidia-pytriton runs ONNX files only")
            command, env = pytriton.command(self.package, self.model, work, http, grpc, metrics)
        targets = {
            protocol: LoadTestTarget(protocol, f"{HOST}:{port}", self.model)
            for port, protocols in ((http, OIP), (grpc, GRPC))
            for protocol in protocols
        }
        return MeasuredServerLaunch(
            command=(*command, "--exit-timeout-secs=3"),
            targets=targets,
            ready=lambda: get(f"{HOST}:{http}", f"/v2/models/{self.model}/ready")[0] == 200,
            env=env,
        )

    def _installed(self, http: int, grpc: int, metrics: int) -> tuple[list[str], dict[str, str]]:
        flags = {
            "model-repository": self.package,
            "http-address": HOST,
            "http-port": http,
            "grpc-address": HOST,
            "grpc-port": grpc,
            "metrics-address": HOST,
            "metrics-port": metrics,
        }
        return [self.program, *(f"--{name}={value}" for name, value in flags.items())], {}
