"""KServe's Python server with a custom model on ONNX Runtime, in one process."""

from __future__ import annotations

from benchmarks.peers.servers.base import INSIDE, Command, PeerLaunch, PeerServer
from modelport.loadtests.system import environments
from modelport.loadtests.system.environments import ONNXRUNTIME

VERSION = "0.21.0"


def command(launch: PeerLaunch) -> Command:
    python = environments.venv("kserve", f"kserve=={VERSION}", ONNXRUNTIME) / "python"
    flags = ["--model_name", launch.model, "--http_port", str(launch.http)]
    flags += ["--grpc_port", str(launch.grpc), "--workers", "1", "--enable_docs_url", "false"]
    env = {"MODEL_FILE": str(launch.onnx)}
    return Command([str(python), str(INSIDE / "kserve_server.py"), *flags], env, launch.work)


SERVER = PeerServer("kserve", f"{VERSION}, custom model, one process", command)
