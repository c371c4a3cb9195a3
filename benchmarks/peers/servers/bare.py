"""The upper limit: one ASGI function around the model in a stock server, without a gateway."""

from __future__ import annotations

from benchmarks.peers.servers.base import INSIDE, Command, PeerLaunch, PeerServer
from modelport.loadtests.system import environments
from modelport.loadtests.system.environments import ONNXRUNTIME

MESSAGES = "tritonclient[grpc]==2.73.0"  # for its generated messages
UVICORN = ("uvicorn[standard]==0.54.0", ONNXRUNTIME, "orjson==3.13.0", MESSAGES)


def in_uvicorn(launch: PeerLaunch) -> Command:
    python = environments.venv("bare", *UVICORN) / "python"
    program = str(INSIDE / "bare_uvicorn.py")
    return Command([str(python), program, str(launch.onnx), str(launch.http), str(launch.grpc)])


SERVER = PeerServer("bare", "one ASGI function in uvicorn, one method in grpc.aio", in_uvicorn)
