"""Kill -9 of real servers that the gateway manages, under load: TorchServe 0.12 and Triton 2.51.

    python -m tests.managed

Also a stand-in with ``tensorflow_model_server``'s flags, because no binary of it can be installed.
Each is killed while it is asked; the gateway must answer 503 with the reason meanwhile, nothing
beyond its deadline, and come back by itself; nothing may be left after SIGTERM or SIGKILL of the
gateway. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelport.exporters.loaded_model import Source
from modelport.gateway.backends.managed.servers import SERVERS
from modelport.loadtests.serving import pytriton
from modelport.loadtests.system import environments
from tests import managed, verb
from tests.managed import DEADLINE_SECONDS, STANDIN, ManagedPlace, infer, load, processes, wrong
from tests.polling import eventually
from tests.server import Gateway
from tests.torchserve.comparison import inputs_of, wire
from tests.torchserve.server import MAX_LENGTH, REQUIREMENTS, publish, sources
from tests.triton_package import use_python_backend

#: What an answer may come later than its deadline.
LATE_SECONDS = 0.1
SHARED_MEMORY = Path("/dev/shm")


def torchserve(work: Path, source: Source) -> dict[str, Any]:
    """``[servers.torchserve]`` for TorchServe from PyPI, and a TorchScript model for it."""
    programs = environments.venv("torchserve", *REQUIREMENTS)
    publish(work / "models", "fraud", source, "torchscript")
    return {"command": [str(programs / "torchserve")], "environment": {"OMP_NUM_THREADS": "1"}}


def tritonserver(work: Path, source: Source) -> dict[str, Any]:
    """Triton from the wheel, whose Python backend runs the model's own ``model.py``."""
    python = environments.venv("triton", *pytriton.REQUIREMENTS) / "python"
    ask = "import sysconfig as s; print(s.get_path('purelib')); print(s.get_config_var('LIBDIR'))"
    said = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True)
    packages, libraries = said.stdout.split()
    home = Path(packages) / "pytriton" / "tritonserver"
    folder = publish(work / "models", "fraud", source, "onnx")
    (folder / "manifest.json").unlink()  # model.py is not in it
    use_python_backend(work / "models", "fraud")
    return {
        "command": [str(home / "bin" / "tritonserver")],
        "arguments": [f"--backend-directory={pytriton.backends(home, work)}"],
        "environment": {
            "LD_LIBRARY_PATH": f"{libraries}:{packages}/nvidia_pytriton.libs",
            "PYTHONPATH": packages,
        },
    }


def tensorflow_model_server(work: Path, source: Source) -> dict[str, Any]:
    """The stand-in: another gateway, which runs the SavedModel."""
    publish(work / "models", "fraud", replace(source, model_kwargs=KWARGS), "savedmodel")
    (work / "mode").write_text("serve")
    return {
        "command": [sys.executable, str(STANDIN), str(work / "mode")],
        "environment": {
            "PYTHONPATH": str(managed.ROOT),
            "STANDIN_CONFIG": str(work / "models" / "fraud"),
        },
    }


#: With which ``sources()`` makes fraud: its Keras port is made from these.
KWARGS = {
    "vocab_size": 512, "d_model": 64, "nhead": 4, "num_layers": 3, "dim_feedforward": 128,
    "max_positions": MAX_LENGTH,
}  # fmt: skip

#: backend → its program, and a word in the command line of each process of it to be killed.
CASES: dict[str, tuple[Callable[[Path, Source], dict[str, Any]], tuple[str, ...]]] = {
    "torchserve": (torchserve, ("org.pytorch.serve.ModelServer", "--foreground", "guardian.py")),
    "triton": (tritonserver, ("bin/tritonserver", "guardian.py")),
    "tfserving": (tensorflow_model_server, ("modelport", "guardian.py")),
}


def routes(work: Path, backend: str, protocol: str, program: dict[str, Any]) -> Path:
    environment = {**program["environment"], managed.MARK: str(work)}
    pairs = ", ".join(f"{name} = {json.dumps(text)}" for name, text in environment.items())
    file = work / "modelport.toml"
    file.write_text(
        f'[models.fraud]\nbackend = "{backend}"\nmanaged = true\nprotocol = "{protocol}"\n'
        f"[servers.{backend}]\ncommand = {json.dumps(program['command'])}\n"
        f"arguments = {json.dumps(program.get('arguments', []))}\nenvironment = {{{pairs}}}\n"
    )
    return file


def victim(work: Path, word: str) -> int:
    guardians = set(processes(work, "guardian.py"))
    found = set(processes(work, word))
    return max(found if word == "guardian.py" else found - guardians)


def document(source: Source) -> dict[str, Any]:
    arrays = inputs_of(source, 1, 8, seed=1)
    tensors = wire(source.signature.inputs, arrays)
    words = {spec.name: spec.datatype.value for spec in source.signature.inputs}
    return {
        "inputs": [
            {"name": n, "datatype": words[n], "shape": list(a.shape), "data": a.ravel().tolist()}
            for n, a in tensors.items()
        ]
    }


def kill(gateway: Gateway, work: Path, word: str, body: dict[str, Any]) -> list[str]:
    """Problems seen while the process with ``word`` was killed under load and came back."""
    with load(gateway, 2, "fraud", body) as outcomes:
        eventually(lambda: outcomes and outcomes[-1].status == 200, "it serves")
        killed_at = time.monotonic()
        os.kill(victim(work, word), signal.SIGKILL)
        eventually(lambda: outcomes[-1].status == 503, "it is down")
        eventually(lambda: outcomes[-1].status == 200, "it is back", 120)
        back = time.monotonic() - killed_at
        eventually(lambda: [o.status for o in outcomes[-8:]] == [200] * 8, "all are served again")
    refused = [outcome for outcome in outcomes if outcome.status == 503]
    slowest = max(outcome.seconds for outcome in outcomes)
    print(
        f"  {word}: back after {back:.1f} s; {len(outcomes)} requests, {len(refused)} refused, "
        f"slowest {slowest:.2f} s"
    )
    late = [f"answered after {slowest:.2f} s"] * (slowest > DEADLINE_SECONDS + LATE_SECONDS)
    return wrong(outcomes, killed_at, "fraud") + late


def check(backend: str, protocol: str, source: Source, end: signal.Signals) -> list[str]:
    prepare, words = CASES[backend]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        program = prepare(work, source)
        (work / "tmp").mkdir()
        place = ManagedPlace.__new__(ManagedPlace)
        place.root, place.repository = work, work / "models"
        file = routes(work, backend, protocol, program)
        body, problems = document(source), []
        with place.serving(routes=file) as gateway:
            if (first := infer(gateway, "fraud", body)).status != 200:
                return [f"{first}; {managed.reason(gateway, 'fraud')}"]
            print(f"{SERVERS[backend].title} over {protocol}, {end.name} at the end:", flush=True)
            for word in words:
                problems += kill(gateway, work, word, body)
            gateway.process.send_signal(end)
            gateway.process.wait(60)
            place.nothing_is_left()
            problems += [f"left: {path}" for path in SHARED_MEMORY.glob("modelport_*")]
    return [f"{backend} over {protocol}: {problem}" for problem in problems]


def main() -> int:
    source = sources()["fraud"]
    wanted = sys.argv[1:] or list(CASES)
    problems = []
    for backend in wanted:
        for protocol, end in (("grpc", signal.SIGTERM), ("http", signal.SIGKILL)):
            problems += check(backend, protocol, source, end)
    for problem in problems:
        print(f"wrong: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    verb.run(main)
