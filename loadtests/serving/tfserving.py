"""``tensorflow_model_server`` with one SavedModel of ``modelport package``, at its own ports.

It has no option for an address and listens on all interfaces (``server.cc``).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.serving.server import MeasuredServerLaunch, get_json
from modelport.loadtests.system.environments import Missing
from modelport.loadtests.system.processes import HOST, free_ports

PROGRAM = "tensorflow_model_server"


def program() -> str:
    """The path of ``tensorflow_model_server``.

    Raises:
        Missing: it is not on PATH, and no package index has it.
    """
    found = shutil.which(PROGRAM)
    if found is None:
        raise Missing(
            f"{PROGRAM} is not on PATH: install tensorflow-model-server from Google's apt "
            "repository (storage.googleapis.com/tensorflow-serving-apt), or take the program out "
            "of the container tensorflow/serving"
        )
    return found


@dataclass(frozen=True)
class TensorFlowServing:
    """TensorFlow Serving with one model; ``package`` is a folder of ``modelport package``."""

    package: Path
    model: str
    program: str

    def launch(self, work: Path) -> MeasuredServerLaunch:
        http, grpc = free_ports(2)
        flags = {
            "port": grpc,
            "rest_api_port": http,
            "model_config_file": self.package / "models.config",
            "file_system_poll_wait_seconds": 0,  # looks once
        }

        def ready() -> bool:
            found = get_json(f"{HOST}:{http}", f"/v1/models/{self.model}") or {}
            states = found.get("model_version_status", ())
            return any(state["state"] == "AVAILABLE" for state in states)

        return MeasuredServerLaunch(
            command=(self.program, *(f"--{name}={value}" for name, value in flags.items())),
            targets={
                LoadTestProtocol.TFSERVING_HTTP: LoadTestTarget(
                    LoadTestProtocol.TFSERVING_HTTP, f"{HOST}:{http}", self.model
                ),
                LoadTestProtocol.TFSERVING_GRPC: LoadTestTarget(
                    LoadTestProtocol.TFSERVING_GRPC, f"{HOST}:{grpc}", self.model
                ),
            },
            ready=ready,
            cwd=work,
        )
