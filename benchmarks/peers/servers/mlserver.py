"""MLServer with a custom runtime on ONNX Runtime, inference in the server's own process."""

from __future__ import annotations

import json

from benchmarks.peers.http_formats import oip_json
from benchmarks.peers.servers.base import INSIDE, Command, PeerLaunch, PeerServer
from modelport.loadtests.system import environments
from modelport.loadtests.system.environments import ONNXRUNTIME

VERSION = "1.7.1"
REQUIREMENTS = (f"mlserver=={VERSION}", ONNXRUNTIME)
MESSAGE_BYTES = 64 << 20  # its default, 4 MiB, is gRPC's


def command(launch: PeerLaunch) -> Command:
    bin_folder = environments.venv("mlserver", *REQUIREMENTS)
    settings = {
        "debug": False,  # its default, true, logs a line per call
        "host": "127.0.0.1",
        "http_port": launch.http,
        "grpc_port": launch.grpc,
        "metrics_port": launch.metrics,
        "grpc_max_message_length": MESSAGE_BYTES,
        "parallel_workers": 0,
    }
    (launch.work / "settings.json").write_text(json.dumps(settings))
    model = {
        "name": launch.model,
        "implementation": "mlserver_runtime.OnnxRuntime",
        "parameters": {"uri": str(launch.onnx), "version": "1"},
    }
    (launch.work / "model-settings.json").write_text(json.dumps(model))
    env = {"PYTHONPATH": str(INSIDE)}
    return Command([str(bin_folder / "mlserver"), "start", str(launch.work)], env, launch.work)


ABOUT = f"{VERSION}, custom runtime, parallel_workers 0"
# Its HTTP has no binary tensors.
SERVER = PeerServer("mlserver", ABOUT, command, encodings={"json": oip_json, "binary": oip_json})
