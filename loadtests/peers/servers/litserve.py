"""LitServe: its API server, and one worker process with the model."""

from __future__ import annotations

from modelport.loadtests import environments
from modelport.loadtests.peers.exchanges import plain_json
from modelport.loadtests.peers.servers.base import INSIDE, ONNXRUNTIME, Command, Launch, Server

VERSION = "0.2.19"


def command(launch: Launch) -> Command:
    python = environments.venv("litserve", f"litserve=={VERSION}", ONNXRUNTIME) / "python"
    program = str(INSIDE / "litserve_server.py")
    arguments = [str(python), program, str(launch.onnx), str(launch.http)]
    return Command(arguments, cwd=launch.work)


SERVER = Server(
    "litserve",
    f"{VERSION}, JSON, fast_queue, one worker",
    command,
    # It takes forms and JSON, so that an image goes as numbers.
    encodings={"json": plain_json("/predict"), "binary": plain_json("/predict")},
    grpc=False,
    ready_path="/health",
)
