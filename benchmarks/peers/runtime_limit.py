"""ONNX Runtime in a loop without a server: the limit of the model itself on one core."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from benchmarks.peers.model import LOOP_NAME
from benchmarks.peers.results import PeerSample
from benchmarks.peers.servers.base import INSIDE
from benchmarks.script import pinned
from modelport.loadtests.system import environments
from modelport.loadtests.system.environments import ONNXRUNTIME
from modelport.loadtests.system.processes import ServerFailed

NAME = LOOP_NAME
ABOUT = f"{ONNXRUNTIME} in a loop, no server"
SLACK_SECONDS = 120.0


def answer(model: Path, request: Path, folder: Path) -> None:
    """Write ONNX Runtime's answer to the request as ``answer.npz``."""
    _loop([str(model), str(request), "1", "0", "1", str(folder / "answer.npz")], 0, None)


def run(
    model: Path, request: Path, batch: int, seconds: float, rows: int | None, core: int
) -> PeerSample:
    """Run for ``seconds``, or until ``rows`` rows are done."""
    runs = -(-rows // batch) if rows else 0
    arguments = [str(model), str(request), str(batch), str(seconds), str(runs)]
    said = json.loads(_loop(arguments, seconds, core))
    return PeerSample(said["rows_per_second"], 0, said["p50_ms"], said["p99_ms"])


def command(arguments: list[str]) -> list[str]:
    """``inside/raw_loop.py`` with its arguments."""
    python = environments.venv("raw", ONNXRUNTIME, "numpy") / "python"
    return [str(python), str(INSIDE / "raw_loop.py"), *arguments]


def _loop(arguments: list[str], seconds: float, core: int | None) -> str:
    done = subprocess.run(
        command(arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds + SLACK_SECONDS,
        preexec_fn=lambda: pinned(core),
    )
    if done.returncode:
        raise ServerFailed(f"the raw loop failed: {done.stderr[-1000:]}")
    return done.stdout
