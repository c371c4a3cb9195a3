"""`modelport loadtest` in every dialect: at the gateway and at real servers.

    python -m tests.loadtests.backends [SERVER...]        # make loadtest-backends

Exports the fraud checkpoint (trained where it is not there yet), starts each server with it and
asks it in every dialect that it speaks, by the command in a process of its own: the checkpoint's
answers must come back. Then once more with answers falsified in the file: that must be found.
``tensorflow_model_server`` is a stand-in, another gateway behind its flags, where PATH has none.
Exits with 1 unless every cell is as it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from modelport.loadtests.compare import models_to_compare
from modelport.loadtests.compare.measured_candidate import MeasuredCandidate
from modelport.loadtests.compare.models_to_compare import ComparisonRequest
from modelport.loadtests.load import payloads
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.serving.gateway import MODELPORT
from modelport.loadtests.serving.server import served
from modelport.loadtests.serving.tfserving import PROGRAM
from modelport.loadtests.system.environments import Missing
from tests import verb

CHECKPOINT = Path("checkpoints/fraud.pt")
STANDIN = Path(__file__).with_name("tensorflow_model_server.py")
SERVERS = ("onnxruntime", "torchserve", "triton", "tfserving")
FORMATS = ("onnx", "torchscript", "savedmodel")
REQUESTS, USERS = 64, 4
SECONDS = 1.0
RUN_SECONDS = 120.0
#: Of so many answers in the control's file one is wrong.
WRONG_EVERY = 2


@dataclass(frozen=True)
class BackendCell:
    """One dialect at one server: what the report said, and what is wrong with that."""

    server: str
    protocol: LoadTestProtocol
    summary: dict[str, Any]
    problem: str

    @property
    def row(self) -> tuple[str, ...]:
        counts = (f"{self.summary.get(key, 0):,}" for key in ("requests", "wrong"))
        latency = self.summary.get("latency", {})
        times = (f"{latency.get(quantile, 0.0):.2f}" for quantile in ("p50", "p99"))
        return self.server, self.protocol, *counts, *times, self.problem or "right"


def falsified(path: Path) -> Path:
    """The file at ``path`` with wrong answers in it."""
    right = payloads.read(path)
    assert right.expected is not None
    wrong = [dict(answer) for answer in right.expected]
    for answer in wrong[::WRONG_EVERY]:
        name, values = next(iter(answer.items()))
        answer[name] = values + np.float32(0.5)
    made = path.with_name(f"falsified-{path.name}")
    payloads.write(replace(right, expected=tuple(wrong)), made)
    return made


def loadtest(target: LoadTestTarget, data: Path, work: Path) -> tuple[int, dict[str, Any], str]:
    """Exit status, the report's summary, the error stream."""
    report = work / "run.json"
    report.unlink(missing_ok=True)
    done = subprocess.run(
        [
            *(*MODELPORT, "loadtest", target.url, "--data", str(data), "--users", str(USERS)),
            *("--duration", f"{SECONDS}s", "--warmup", "300ms", "--json", str(report), "--quiet"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_SECONDS,
    )
    summary = json.loads(report.read_text())["summary"] if report.is_file() else {}
    return done.returncode, summary, " ".join(done.stderr.split())


def problem(target: LoadTestTarget, requests: Path, work: Path) -> tuple[dict[str, Any], str]:
    """The summary of the run with correct answers, and what is wrong with that run or the other."""
    status, summary, said = loadtest(target, requests, work)
    if status or not summary.get("ok") or summary["ok"] != summary["requests"]:
        return summary, f"exit {status}: {summary.get('errors') or said}"
    status, control, said = loadtest(target, falsified(requests), work)
    if status != 1 or not control.get("wrong"):
        return summary, f"a wrong answer was not found: exit {status}, {control or said}"
    return summary, ""


def measure(contender: MeasuredCandidate, work: Path, console: Console) -> list[BackendCell]:
    """Every dialect that its server speaks."""
    cells = []
    name = contender.entry.backend
    with served(contender.backend, work / name) as server:
        for protocol, target in server.targets.items():
            cells.append(BackendCell(name, protocol, *problem(target, contender.requests, work)))
            console.print(*cells[-1].row, highlight=False)
    return cells


def stand_in(work: Path, config: Path) -> None:
    """``tensorflow_model_server`` on PATH, where there is none."""
    if shutil.which(PROGRAM) is not None:
        return
    (work / "bin").mkdir()
    program = work / "bin" / PROGRAM
    words = shlex.join([sys.executable, str(STANDIN)])
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o755)
    root = str(STANDIN.parents[2])
    os.environ["PATH"] = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    os.environ["STANDIN_CONFIG"] = str(config)


def table(cells: list[BackendCell]) -> Table:
    shown = Table("server", "dialect", "requests", "wrong", "p50 ms", "p99 ms", "")
    for cell in cells:
        shown.add_row(*cell.row)
    return shown


def run(servers: list[str], work: Path, console: Console) -> list[BackendCell]:
    wanted = ComparisonRequest(FORMATS, tuple(servers), requests=REQUESTS, seed=0)
    given = models_to_compare.checkpoint(CHECKPOINT, None, None, None)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if "tfserving" in servers:
        stand_in(work, work / "config")
    lineup = models_to_compare.from_checkpoint(
        given, wanted, cache / "modelport" / "compare", work, console.print
    )
    if lineup.absent:
        raise Missing("; ".join(f"{one.name}: {one.why}" for one in lineup.absent))
    cells = []
    for contender in lineup.contenders:
        shutil.rmtree(work / "config", ignore_errors=True)
        shutil.copytree(contender.artifact.folder, work / "config")
        cells += measure(contender, work, console)
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.loadtests.backends")
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=", ".join(SERVERS))
    servers = parser.parse_args().servers or list(SERVERS)
    if unknown := [name for name in servers if name not in SERVERS]:
        parser.error(f"'{unknown[0]}' is none of {', '.join(SERVERS)}")
    if not CHECKPOINT.exists():
        subprocess.run([*MODELPORT, "demo"], check=True)
    console = Console(width=120)
    with tempfile.TemporaryDirectory(prefix="modelport-backends-") as work:
        cells = run(servers, Path(work), console)
    console.print(table(cells))
    wrong = [cell for cell in cells if cell.problem]
    print(f"{len(cells)} dialects at {len(servers)} servers, {len(wrong)} wrong")
    return int(bool(wrong) or not cells)


if __name__ == "__main__":
    verb.run(main)
