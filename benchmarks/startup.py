"""Start-up time of the gateway: `python -m benchmarks.startup`.

Two comparisons: from `exec` to READY with three ONNX models, against a plain script that imports
the runtime and creates the same sessions, and against a real Triton, whose Python backend runs the
same files; and the first request of every batch size, against later ones. Rounds are interleaved,
and only ratios within one run are meaningful. At the end, each program starts once more with
`-X importtime`, and a table shows the time by package.

The gateway has an environment of its own, as Triton has: with its base dependencies and no extra.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks import script, tiny_model
from modelport.loadtests.serving import pytriton
from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import HOST, ServerFailed, free_ports, running

MODELS = ("first", "second", "third")
MAX_BATCH_SIZE = 8
POLL_SECONDS = 0.002
BY_HAND = """\
import sys
import onnxruntime
sessions = [
    onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in sys.argv[1:]
]
print("ready", flush=True)
"""
NOTHING_MORE: Mapping[str, str] = MappingProxyType({})
#: The environment's form of `python -X importtime`.
IMPORTS_TOLD = {"PYTHONPROFILEIMPORTTIME": "1"}
_IMPORT = re.compile(r"import time: +(\d+) \| +\d+ \| +(\w+)[\w.]*$", re.MULTILINE)


def repository() -> Path:
    """Write three copies of the 4-float model as separate models."""
    source = tiny_model.repository() / tiny_model.NAME
    home = environments.folder("startup_repository")
    for name in MODELS:
        (home / name / "1").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / "1" / "model.onnx", home / name / "1" / "model.onnx")
        text = tiny_model.CONFIG.replace(f'"{tiny_model.NAME}"', f'"{name}"')
        (home / name / "config.pbtxt").write_text(text)
    return home


def environment() -> dict[str, str]:
    """An environment in which bytecode lies beside the modules, as for installed programs."""
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}


def log() -> Path:
    """The stderr of the program started last."""
    return environments.folder("logs") / "startup.log"


def by_hand_seconds(home: Path, more: Mapping[str, str] = NOTHING_MORE) -> float:
    """Time the plain script; ``more`` extends its environment."""
    files = [str(home / name / "1" / "model.onnx") for name in MODELS]
    command, told = [sys.executable, "-c", BY_HAND, *files], {**environment(), **more}
    started = time.perf_counter()
    with (
        log().open("wb") as out,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=out, env=told) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        seconds = time.perf_counter() - started
    if process.returncode:
        raise ServerFailed("the script that loads by hand failed")
    return seconds


def executable() -> Path:
    """``modelport`` in an environment without extras, made at the first run."""
    root = environments.ROOT
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    requirements = (*project["dependencies"], "--editable", str(root))
    pinned = ("--constraint", str(root / "constraints.txt"))
    return environments.venv("modelport-base", *pinned, *requirements) / "modelport"


@contextlib.contextmanager
def gateway(home: Path, more: Mapping[str, str] = NOTHING_MORE) -> Iterator[tuple[float, int]]:
    """Yield the seconds from `exec` until the gateway is READY, and its HTTP port."""
    http_port, grpc_port, metrics_port = free_ports(3)
    flags = ["--model-repository", str(home)]
    for name, port in (("http", http_port), ("grpc", grpc_port), ("metrics", metrics_port)):
        flags += [f"--{name}-port", str(port)]
    command = [str(executable()), "serve", *flags]
    with started(command, {**environment(), **more}, http_port) as seconds:
        yield seconds, http_port


def triton_seconds(home: Path) -> float:
    """Seconds from `exec` until a real Triton is READY with the same models."""
    work, ports = environments.folder("startup_triton"), free_ports(3)
    models = pytriton.onnx_models(home, MODELS, work)
    command, more = pytriton.serve(models, work, *ports)
    with started(command, {**environment(), **more}, ports[0]) as seconds:
        return seconds


@contextlib.contextmanager
def started(command: list[str], environ: Mapping[str, str], port: int) -> Iterator[float]:
    """Yield the seconds from `exec` until `/v2/health/ready` is 200."""
    began = time.perf_counter()
    with running(
        command,
        log=log(),
        ready=lambda: ready(port),
        env=environ,
        cwd=environments.ROOT,
        must_stop=False,
    ):
        yield time.perf_counter() - began


def ready(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def first_and_warm(port: int, repeats: int) -> dict[int, tuple[float, float]]:
    """Seconds of the first request of each batch size, and the median of later ones."""
    connection = http.client.HTTPConnection(HOST, port, timeout=30)
    times = {}
    # Connection and client are warm, so the first request of a batch size measures the server.
    ask(connection, MODELS[1], 1)
    for batch in range(1, MAX_BATCH_SIZE + 1):
        first = ask(connection, MODELS[0], batch)
        warm = [ask(connection, MODELS[0], batch) for _ in range(repeats)]
        times[batch] = (first, statistics.median(warm))
    connection.close()
    return times


def ask(connection: http.client.HTTPConnection, model: str, batch: int) -> float:
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": [batch, 4],
        "data": list(tiny_model.VALUES) * batch,
    }
    body = json.dumps({"inputs": [tensor]})
    started = time.perf_counter()
    connection.request("POST", f"/v2/models/{model}/infer", body)
    reply = connection.getresponse()
    content = reply.read()
    seconds = time.perf_counter() - started
    if reply.status != 200:
        raise ServerFailed(f"HTTP {reply.status}: {content.decode()}")
    return seconds


def import_microseconds(said: str) -> Counter[str]:
    """Import time by top-level package, without the modules that it imports."""
    took: Counter[str] = Counter()
    for microseconds, package in _IMPORT.findall(said):
        took[package] += int(microseconds)
    return took


def print_imports(home: Path) -> None:
    """Print the imports of both starts; recording them costs a little time itself."""
    by_hand_seconds(home, IMPORTS_TOLD)
    by_hand = import_microseconds(log().read_text())
    with gateway(home, IMPORTS_TOLD):
        ours = import_microseconds(log().read_text())
    print(f"{'imports of':24}{'by hand':>10}{'modelport':>11}, milliseconds")
    large = [name for name, _ in ours.most_common() if max(ours[name], by_hand[name]) >= 1000]
    for name in large:
        print(f"{name:24}{by_hand[name] / 1e3:10.1f}{ours[name] / 1e3:11.1f}")
    rest = [sum(all_.values()) - sum(all_[name] for name in large) for all_ in (by_hand, ours)]
    print(f"{'all others':24}{rest[0] / 1e3:10.1f}{rest[1] / 1e3:11.1f}")
    print(f"{'together':24}{by_hand.total() / 1e3:10.1f}{ours.total() / 1e3:11.1f}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--rounds", type=script.count, default=9)
    parser.add_argument(
        "--requests", type=script.count, default=200, help="warm requests of each batch size"
    )
    options = parser.parse_args(arguments)
    home = repository()
    by_hand_seconds(home)  # writes the bytecode, and loads the files into memory
    with gateway(home):
        pass
    triton_seconds(home)
    times, ratios = [], dict[int, list[float]]()
    for _ in range(options.rounds):
        by_hand, triton = by_hand_seconds(home), triton_seconds(home)
        with gateway(home) as (seconds, port):
            times.append((by_hand, triton, seconds))
            for batch, (first, warm) in first_and_warm(port, options.requests).items():
                ratios.setdefault(batch, []).append(first / warm)
    hand, peer, ours = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"by hand {hand:.3f} s, Triton READY {peer:.3f} s, modelport READY {ours:.3f} s")
    print(f"modelport / by hand: {spread([seconds / by_hand for by_hand, _, seconds in times])}")
    print(f"modelport / Triton: {spread([seconds / triton for _, triton, seconds in times])}")
    for batch, values in sorted(ratios.items()):
        print(f"batch {batch}: first request {spread(values)} the warm median")
    print_imports(home)
    return 0


def spread(ratios: list[float]) -> str:
    """Median, lowest and highest ratio."""
    return f"{statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    script.run(main)
