"""Ray Serve: its proxy, and one replica with the model."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.peers.http_formats import npy, plain_json
from benchmarks.peers.servers.base import INSIDE, Command, PeerLaunch, PeerServer
from modelport.loadtests.system import environments
from modelport.loadtests.system.environments import ONNXRUNTIME

VERSION = "2.60.0"


def command(launch: PeerLaunch) -> Command:
    python = environments.venv("ray", f"ray[serve]=={VERSION}", ONNXRUNTIME) / "python"
    # Its sockets are in this folder, and a socket's path has at most 107 bytes.
    folder = Path(tempfile.gettempdir()) / f"modelport-ray-{launch.http}"
    program = str(INSIDE / "ray_server.py")
    env = {
        "PYTHONPATH": str(INSIDE),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_AUTH_MODE": "disabled",  # it would write a token into the home folder
        "RAY_raylet_start_wait_time_s": "100",  # all of it starts on one core
    }
    arguments = [str(python), program, str(launch.onnx), str(launch.http), str(folder)]
    return Command(arguments, env, launch.work, (folder,))


SERVER = PeerServer(
    "ray",
    f"Ray Serve {VERSION}, JSON or .npy, one replica",
    command,
    encodings={"json": plain_json("/predict"), "binary": npy("/predict")},
    grpc=False,
    ready_path="/-/healthz",
)
