"""The limit: no gateway at all, one ASGI function on uvicorn and one method on grpcio."""

from __future__ import annotations

from loadtests import environments, tiny_model
from loadtests.peers.servers.base import INSIDE, Command, Launch, Server

REQUIREMENTS = (
    "uvicorn[standard]==0.54.0",
    "onnxruntime",
    "orjson",
    "tritonclient[grpc]",  # for its generated messages
)


def command(launch: Launch) -> Command:
    python = environments.venv("bare", *REQUIREMENTS) / "python"
    application = INSIDE / "bare_application.py"
    model = launch.repository / tiny_model.NAME / "1" / "model.onnx"
    return Command([str(python), str(application), str(model), str(launch.http), str(launch.grpc)])


SERVER = Server("bare", "uvicorn / grpc.aio + ONNX Runtime, nothing else", command)
