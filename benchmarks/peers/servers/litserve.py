"""LitServe: its API server, and one worker process with the model."""

from __future__ import annotations

from benchmarks.peers.http_formats import plain_json
from benchmarks.peers.servers.base import INSIDE, Command, PeerLaunch, PeerServer
from modelport.loadtests.system import environments
from modelport.loadtests.system.environments import ONNXRUNTIME

VERSION = "0.2.19"


def command(launch: PeerLaunch) -> Command:
    python = environments.venv("litserve", f"litserve=={VERSION}", ONNXRUNTIME) / "python"
    program = str(INSIDE / "litserve_server.py")
    arguments = [str(python), program, str(launch.onnx), str(launch.http)]
    return Command(arguments, cwd=launch.work)


SERVER = PeerServer(
    "litserve",
    f"{VERSION}, JSON, fast_queue, one worker",
    command,
    # It accepts forms and JSON, so an image is sent as numbers.
    encodings={"json": plain_json("/predict"), "binary": plain_json("/predict")},
    grpc=False,
    ready_path="/health",
)
