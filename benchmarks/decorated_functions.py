"""A function with ``@modelport.model`` beside the same function in LitServe and BentoML.

`python -m benchmarks.decorated_functions`

The function adds 1 to four numbers. Each server has one worker process and an environment of its
own, gets JSON in its own form over HTTP, and takes the load of ``wrk`` in turns with the others.
Only ratios within one run are meaningful.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import script
from benchmarks.peers.servers import bentoml, litserve
from benchmarks.peers.servers.base import INSIDE
from benchmarks.peers.servers.modelport import executable
from benchmarks.python_backend import LoadSample, over_http
from benchmarks.script import only
from modelport.loadtests.system import environments
from modelport.loadtests.system.environments import ONNXRUNTIME
from modelport.loadtests.system.processes import HOST, free_ports, running

IN_FLIGHT = 16
#: The least ratio of modelport's rate to each other one.
LEAST = 3.0
VALUES = [1.0, 2.0, 3.0, 4.0]
_TENSOR = {"name": "x", "datatype": "FP32", "shape": [4], "data": VALUES}


class FunctionServer(NamedTuple):
    """A server of the function: its address, and the request in its form."""

    url: str
    body: Path


@contextlib.contextmanager
def servers(work: Path, core: int | None) -> Iterator[dict[str, FunctionServer]]:
    """All servers of the function."""
    lit = environments.venv("litserve", f"litserve=={litserve.VERSION}", ONNXRUNTIME)
    bento = environments.venv("bentoml", f"bentoml=={bentoml.VERSION}", ONNXRUNTIME)
    ports = free_ports(5)
    http, grpc, metrics = map(str, ports[:3])
    home = {"BENTOML_DO_NOT_TRACK": "True", "BENTOML_HOME": str(work), "PYTHONPATH": str(INSIDE)}
    commands: dict[str, tuple[list[str], dict[str, str], str, str, Any]] = {
        "modelport": (
            [*executable(), "serve", str(INSIDE / "modelport_increment.py"), "--allow-python",
             "--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics],
            {"PYTHONPATH": ""}, f"{http}/v2/health/ready", f"{http}/v2/models/increment/infer",
            {"inputs": [_TENSOR]},
        ),
        "LitServe": (
            [str(lit / "python"), str(INSIDE / "litserve_increment.py"), str(ports[3])],
            {}, f"{ports[3]}/health", f"{ports[3]}/predict", {"x": VALUES},
        ),
        "BentoML": (
            [str(bento / "bentoml"), "serve", "bentoml_increment:IncrementService", "--host", HOST,
             "--port", str(ports[4])],
            home, f"{ports[4]}/readyz", f"{ports[4]}/increment", {"x": VALUES},
        ),
    }  # fmt: skip
    found = {}
    with contextlib.ExitStack() as stack:
        for name, (command, variables, ready, path, document) in commands.items():
            options: dict[str, Any] = {"env": variables, "cores": only(core), "must_stop": False}
            log = work / f"{name}.log"
            stack.enter_context(
                running(command, log=log, ready=f"http://{HOST}:{ready}", cwd=INSIDE, **options)
            )
            body = work / f"{name}.json"
            body.write_text(json.dumps(document))
            found[name] = FunctionServer(f"http://{HOST}:{path}", body)
            _check(name, found[name])
        yield found


def _check(name: str, peer: FunctionServer) -> None:
    """Require the right answer."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(peer.url, peer.body.read_bytes(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.load(reply)
    if isinstance(answer, dict):
        answer = answer["outputs"][0]["data"] if "outputs" in answer else answer["output"]
    if answer != [value + 1 for value in VALUES]:
        raise SystemExit(f"{name} answers {answer}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decorated_functions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3, help="of each load")
    parser.add_argument("--server-core", type=int, help="pin each server to this core")
    options = parser.parse_args(arguments)
    rows: dict[str, list[LoadSample]] = {}
    header = 'wrk.headers["Content-Type"] = "application/json"\n'
    core = options.server_core
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder), core) as found:
        for _ in range(options.rounds):
            for name, peer in found.items():
                sample = over_http(peer.url, peer.body, header, IN_FLIGHT, options.seconds)
                rows.setdefault(name, []).append(sample)
    print("| server | requests/s | p50 ms | modelport's ratio (min-max) |\n|---|---|---|---|")
    missed = False
    for name, samples in rows.items():
        pairs = zip(rows["modelport"], samples, strict=True)
        ratios = [ours.rate / theirs.rate for ours, theirs in pairs]
        rate, p50 = (
            statistics.median(getattr(each, field) for each in samples)
            for field in ("rate", "p50_ms")
        )
        ratio = statistics.median(ratios)
        missed |= name != "modelport" and ratio < LEAST
        span = f"{ratio:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"| {name} | {rate:,.0f} | {p50:.2f} | {span} |")
    return int(missed)


if __name__ == "__main__":
    script.run(main)
