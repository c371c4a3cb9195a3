"""MLServer with a custom runtime on ONNX Runtime, inference in the server's own process."""

from __future__ import annotations

import json

from loadtests import environments, tiny_model
from loadtests.peers.servers.base import INSIDE, Command, Launch, Server

VERSION = "1.7.1"
REQUIREMENTS = (f"mlserver=={VERSION}", "onnxruntime")


def command(launch: Launch) -> Command:
    bin_folder = environments.venv("mlserver", *REQUIREMENTS)
    settings = {
        "debug": False,  # its default, true, logs a line per call
        "host": "127.0.0.1",
        "http_port": launch.http,
        "grpc_port": launch.grpc,
        "metrics_port": launch.metrics,
        "parallel_workers": 0,
    }
    (launch.work / "settings.json").write_text(json.dumps(settings))
    model = {
        "name": tiny_model.NAME,
        "implementation": "mlserver_runtime.OnnxRuntime",
        "parameters": {
            "uri": str(launch.repository / tiny_model.NAME / "1" / "model.onnx"),
            "version": "1",
        },
    }
    (launch.work / "model-settings.json").write_text(json.dumps(model))
    env = {"PYTHONPATH": str(INSIDE)}
    return Command([str(bin_folder / "mlserver"), "start", str(launch.work)], env, launch.work)


SERVER = Server("mlserver", f"{VERSION}, custom runtime, parallel_workers 0", command)
