"""The limit: no gateway at all, one ASGI function around the model, in the fronts of modelport."""

from __future__ import annotations

from loadtests import environments
from loadtests.peers.servers.base import INSIDE, ONNXRUNTIME, Command, Launch, Server
from loadtests.processes import HOST

MESSAGES = "tritonclient[grpc]==2.73.0"  # for its generated messages
UVICORN = ("uvicorn[standard]==0.54.0", ONNXRUNTIME, "orjson==3.13.0", MESSAGES)
ENVOY = ("pyvoy==1.3.0", ONNXRUNTIME, "orjson==3.13.0", MESSAGES)


def in_uvicorn(launch: Launch) -> Command:
    python = environments.venv("bare", *UVICORN) / "python"
    program = str(INSIDE / "bare_uvicorn.py")
    return Command([str(python), program, str(launch.onnx), str(launch.http), str(launch.grpc)])


def in_envoy(launch: Launch) -> Command:
    pyvoy = str(environments.venv("pyvoy", *ENVOY) / "pyvoy")
    env = {"PYTHONPATH": str(INSIDE), "MODEL_FILE": str(launch.onnx)}
    where = ["--address", HOST, "--port", str(launch.http), "--log-level", "error"]
    return Command([pyvoy, "bare_envoy:application", *where, "--", "--concurrency", "1"], env)


PORTABLE = Server(
    "bare-portable", "one ASGI function in uvicorn, one method in grpc.aio", in_uvicorn
)
ENVOYS = Server("bare-envoy", "one ASGI function in Envoy, both protocols", in_envoy, one_port=True)
