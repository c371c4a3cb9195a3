"""Repositories of ``modelport package --for triton``, with warm-up, in a real Triton 2.51.

    python -m tests.triton_package

The server comes with the wheel ``nvidia-pytriton``, which has the Python backend only. So Triton's
core reads the packaged configuration and warm-up requests as they are but for the backend's name,
and that backend runs the packaged ONNX file in ONNX Runtime. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tritonclient.http

from modelport.exporters.loaded_model import Source
from modelport.exporters.packaging.package import package
from modelport.gateway.repository import config
from modelport.loadtests.serving import pytriton
from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import HOST, free_ports, running
from tests import verb
from tests.torchserve.clients import as_tensors
from tests.torchserve.comparison import compare, inputs_of, wire
from tests.torchserve.server import MAX_BATCH_SIZE, MAX_LENGTH, publish, sources

#: Runs inside Triton: the ONNX file beside it, noting what it is asked.
MODEL = """
import json, os, sys
from pathlib import Path
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
import onnxruntime
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.outputs = [tensor["name"] for tensor in config["output"]]
        here = Path(args["model_repository"]) / args["model_version"]
        self.session = onnxruntime.InferenceSession(here / "model.onnx")
        self.notes = here / "asked.jsonl"

    def execute(self, requests):
        return [self.answer(request, len(requests)) for request in requests]

    def answer(self, request, count):
        arrays = {n: pb_utils.get_input_tensor_by_name(request, n).as_numpy() for n in self.inputs}
        asked = {n: [list(x.shape), float(x.min()), float(x.max())] for n, x in arrays.items()}
        with self.notes.open("a") as notes:
            notes.write(json.dumps({"together": count, "inputs": asked}) + "\\n")
        values = self.session.run(self.outputs, arrays)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, value) for name, value in zip(self.outputs, values)]
        )
"""


def use_python_backend(repository: Path, name: str) -> None:
    file = repository / name / config.FILENAME
    packaged = config.parse(file.read_text())
    packaged.platform, packaged.backend = "", "python"
    packaged.default_model_filename = "model.py"
    file.write_text(config.to_text(packaged))
    (repository / name / "1" / "model.py").write_text(MODEL)


@dataclass(frozen=True)
class TritonPorts:
    http: int
    grpc: int


@contextlib.contextmanager
def tritonserver(work: Path, repository: Path) -> Iterator[TritonPorts]:
    """A Triton that has loaded ``repository``."""
    python = environments.venv("triton", *pytriton.REQUIREMENTS) / "python"
    ask = "import sysconfig as s; print(s.get_path('purelib')); print(s.get_config_var('LIBDIR'))"
    said = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True)
    packages, libraries = said.stdout.split()
    home = Path(packages) / "pytriton" / "tritonserver"
    http, grpc, metrics = free_ports(3)
    flags: dict[str, Any] = {
        "model-repository": repository,
        "backend-directory": pytriton.backends(home, work),
        "http-address": HOST,
        "http-port": http,
        "grpc-address": HOST,
        "grpc-port": grpc,
        "metrics-address": HOST,
        "metrics-port": metrics,
        # Its Python backend does not let go of a decoupled model whose streams are over.
        "exit-timeout-secs": 5,
    }
    command = [str(home / "bin" / "tritonserver")]
    command += [f"--{name}={value}" for name, value in flags.items()]
    env = {
        "LD_LIBRARY_PATH": f"{libraries}:{packages}/nvidia_pytriton.libs",
        "PYTHONPATH": packages,
    }
    ready = f"http://{HOST}:{http}/v2/health/ready"
    with running(command, log=work / "triton.log", ready=ready, env=env):
        yield TritonPorts(http, grpc)


def check_warmup(source: Source, notes: Path) -> Iterator[str]:
    """Problems in what the model was asked before it was ready."""
    asked = [json.loads(line) for line in notes.read_text().splitlines()]
    together = [note["together"] for note in asked]
    if together != [MAX_BATCH_SIZE] * MAX_BATCH_SIZE + [1]:
        yield f"warm-up ran {together} requests at once"
    for spec in source.signature.inputs:
        for note, length in ((asked[0], MAX_LENGTH), (asked[-1], (1 + MAX_LENGTH) // 2)):
            shape, low, high = note["inputs"][spec.name]
            dims = spec.dims if spec.reshape is None else spec.reshape
            expected = [1, *(length if isinstance(dim, str) else dim for dim in dims)]
            if shape != expected:
                yield f"warm-up sent '{spec.name}' as {shape}, not {expected}"
            most = length if isinstance(spec.maximum, str) else spec.maximum
            if (spec.minimum is not None and low < spec.minimum) or (most and high > most):
                yield f"warm-up sent '{spec.name}' in [{low}, {high}]"


def check_answers(source: Source, name: str, address: str) -> Iterator[str]:
    """Problems in what Triton answers for the packaged artifact."""
    with contextlib.closing(tritonclient.http.InferenceServerClient(address)) as client:
        for batch, length in ((1, 1), (2, 17), (MAX_BATCH_SIZE, MAX_LENGTH)):
            inputs = inputs_of(source, batch, length, seed=batch)
            result = client.infer(name, as_tensors(wire(source.signature.inputs, inputs)))
            outputs = {spec.name: result.as_numpy(spec.name) for spec in source.signature.outputs}
            problem, error = compare(source, inputs, 200, outputs)
            print(f"{name}, batch {batch}, length {length}: largest error {error:.1e}")
            if problem:
                yield f"{name}: {problem}"


def main() -> int:
    found = {name: source for name, source in sources().items() if name != "unchecked"}
    with tempfile.TemporaryDirectory() as folder:
        work, problems = Path(folder), []
        for name, source in found.items():
            publish(work / "published", name, source, "onnx")
        repository = work / "packaged"
        package(work / "published", "triton", repository)
        for name in found:
            use_python_backend(repository, name)
        with tritonserver(work, repository) as ports:
            address = f"{HOST}:{ports.http}"
            for name, source in found.items():
                problems += check_warmup(source, repository / name / "1" / "asked.jsonl")
                problems += check_answers(source, name, address)
    for problem in problems:
        print(f"wrong: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    verb.run(main)
