"""BentoML with one worker; a tensor file comes as the body of an upload."""

from __future__ import annotations

from benchmarks.peers.http_formats import npy, plain_json
from benchmarks.peers.servers.base import INSIDE, Command, PeerLaunch, PeerServer
from modelport.loadtests.system import environments
from modelport.loadtests.system.environments import ONNXRUNTIME
from modelport.loadtests.system.processes import HOST

VERSION = "1.4.39"


def command(launch: PeerLaunch) -> Command:
    program = environments.venv("bentoml", f"bentoml=={VERSION}", ONNXRUNTIME) / "bentoml"
    flags = ["--host", HOST, "--port", str(launch.http)]
    env = {
        "MODEL_FILE": str(launch.onnx),
        "PYTHONPATH": str(INSIDE),
        "BENTOML_DO_NOT_TRACK": "True",
        "BENTOML_HOME": str(launch.work),
    }
    arguments = [str(program), "serve", "bentoml_service:BentoMLService", *flags]
    return Command(arguments, env, INSIDE)


SERVER = PeerServer(
    "bentoml",
    f"{VERSION}, JSON or .npy, one worker",
    command,
    encodings={"json": plain_json("/predict"), "binary": npy("/predict_file")},
    grpc=False,
    ready_path="/readyz",
)
