"""TorchServe with one worker, whose handler runs ONNX Runtime; needs Java."""

from __future__ import annotations

import json
import os
import shutil
import zipfile

from benchmarks.peers.http_formats import npy, plain_json
from benchmarks.peers.servers.base import INSIDE, Command, PeerLaunch, PeerServer
from modelport.loadtests.system import environments
from modelport.loadtests.system.environments import ONNXRUNTIME
from modelport.loadtests.system.processes import HOST

VERSION = "0.12.0"
# torch is pinned, so that no other requirement selects a build.
REQUIREMENTS = ("torch==2.13.0", f"torchserve=={VERSION}", "pyyaml", ONNXRUNTIME)
HANDLER = "torchserve_handler.py"
NAME = "served"


def archive(launch: PeerLaunch) -> None:
    """Write the model store with one archive of a handler; the model stays in place."""
    store = launch.work / "store"
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir()
    model = {"modelName": NAME, "modelVersion": "1.0", "handler": f"{HANDLER}:handle"}
    with zipfile.ZipFile(store / f"{NAME}.mar", "w") as file:
        file.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": model, "runtime": "python"}))
        for name in (HANDLER, "plain.py", "onnx_model.py"):
            file.write(INSIDE / name, name)


def command(launch: PeerLaunch) -> Command:
    if shutil.which("java") is None:
        raise environments.Missing("java is missing: install Java 17")
    programs = environments.venv("torchserve-onnx", *REQUIREMENTS)
    archive(launch)
    management, grpc_management = launch.more[:2]
    workers = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 1, "responseTimeout": 300}
    models = {NAME: {"1.0": {"defaultVersion": True, "marName": f"{NAME}.mar", **workers}}}
    settings = {
        "inference_address": f"http://{HOST}:{launch.http}",
        "management_address": f"http://{HOST}:{management}",
        "metrics_address": f"http://{HOST}:{launch.metrics}",
        "grpc_inference_address": HOST,
        "grpc_management_address": HOST,
        "grpc_inference_port": launch.grpc,
        "grpc_management_port": grpc_management,
        "disable_token_authorization": "true",
        "max_request_size": 64 << 20,
        "model_store": launch.work / "store",
        "models": json.dumps(models),
        "load_models": f"{NAME}.mar",
    }
    file = launch.work / "config.properties"
    file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    temporary = launch.work / "tmp"
    temporary.mkdir(exist_ok=True)
    env = {
        "MODEL_FILE": str(launch.onnx),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "TMPDIR": str(temporary),
        "TEMP": str(temporary),
        "LOG_LOCATION": str(launch.work),
        "METRICS_LOCATION": str(launch.work),
    }
    arguments = [str(programs / "torchserve"), "--start", "--foreground", "--ncs"]
    return Command([*arguments, "--ts-config", str(file)], env, launch.work)


SERVER = PeerServer(
    "torchserve",
    f"{VERSION}, JSON or .npy, one worker",
    command,
    encodings={
        "json": plain_json(f"/predictions/{NAME}"),
        "binary": npy(f"/predictions/{NAME}"),
    },
    grpc=False,
    ready_path="/ping",
)
