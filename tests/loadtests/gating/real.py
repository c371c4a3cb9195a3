"""Gates on real servers of the demo's fraud model: ``make gate-real``.

The same published version against itself, in processes of its own each round, or against another
training of it; and one running gateway against itself behind two proxies, one of which raises the
p99 by 15 % or spoils one answer in a hundred. Counts are written as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from rich.progress import Progress

from modelport.gateway.repository import manifest
from modelport.gateway.slo import Slo, parse
from modelport.loadtests.gate import baseline_and_candidate, gate
from modelport.loadtests.gate.criteria import PairedRound
from modelport.loadtests.gate.decision import GateDecision
from modelport.loadtests.load.target import LoadTestProtocol
from modelport.loadtests.number_format import change
from modelport.loadtests.serving.gateway import MeasuredGateway, newest_version
from modelport.loadtests.serving.server import served
from modelport.loadtests.system.environments import ROOT
from modelport.loadtests.system.modelport_command import modelport
from modelport.loadtests.system.processes import HOST, free_ports, running
from tests.loadtests.gating import simulation

CASES = {
    "identical, fresh processes": None,
    "identical, behind proxies": (),
    "p99 +15 %": ("--tail", "1.15"),
    "1 % wrong": ("--wrong", "0.01"),
}
#: Other weights of the same model: with their own answers, or with those of yet others.
AGAIN, AGAIN_WRONG = "trained again", "trained again, wrong"
ALL_CASES = [*CASES, AGAIN, AGAIN_WRONG]
#: Of either side, in a recorded round.
LEAST_REQUESTS = 500
FRAUD = ROOT / "model_repository" / "fraud"


def slo(seconds: float, batch_size: int) -> Slo:
    """The defaults but for the length."""
    duration = {"max_seconds": seconds, "slice_seconds": 2.0}
    return parse({"duration": duration, "load": {"batch_size": batch_size}})


@contextlib.contextmanager
def proxy(upstream: str, arguments: tuple[str, ...], work: Path) -> Iterator[str]:
    """The address of a proxy before ``upstream``."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tests.loadtests.gating.proxy", str(port), upstream]
    log = work / f"proxy-{port}.log"
    ready = f"http://{HOST}:{port}/v2/health/ready"
    with running([*command, *arguments], log=log, ready=ready, cwd=ROOT, must_stop=False):
        yield f"{HOST}:{port}"


@contextlib.contextmanager
def proxies(*each: tuple[str, ...], model: Path = FRAUD) -> Iterator[list[str]]:
    """URLs of ``model`` behind one proxy each, all before one gateway."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        work = Path(folder)
        server = stack.enter_context(served(MeasuredGateway(model), work / "gateway"))
        upstream = server.targets[LoadTestProtocol.OIP_HTTP].address
        addresses = [stack.enter_context(proxy(upstream, one, work)) for one in each]
        yield [f"http://{address}/v2/models/{model.name}" for address in addresses]


def retrained(folder: Path, *, wrong: bool = False, source: Path = FRAUD) -> tuple[Path, Path]:
    """``source``'s newest version, and a version of other weights as its successor.

    The weights are those of the first with noise: certificate and record are what an export makes
    of them. Args: wrong: the record is the predecessor's.
    """
    version = source / newest_version(source)
    model = folder / source.name
    shutil.copytree(version, model / "1")
    shutil.copytree(version, model / "2")
    for file in source.iterdir():
        if file.is_file():
            shutil.copy(file, model)
    shutil.copytree(source / "warmup", model / "warmup")
    graph = onnx.load(model / "2" / "model.onnx")
    generator = np.random.default_rng(1)
    for tensor in graph.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.ndim > 1:
            noisy = values + 0.01 * generator.standard_normal(values.shape).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(noisy, tensor.name))
    onnx.save(graph, model / "2" / "model.onnx")
    path = model / "2" / "certificate.json"
    certificate = json.loads(path.read_text())
    certificate["checkpoint"]["sha256"] = 64 * "2"
    artifact = model / "2" / "model.onnx"
    certificate["artifact"]["files"][artifact.name]["sha256"] = manifest.sha256_of(artifact)
    certificate["artifact"]["size_bytes"] = artifact.stat().st_size
    if not wrong:
        del certificate["samples"]
        (model / "2" / "samples.json").unlink()
    path.write_text(json.dumps(certificate))
    manifest.write(model / "2")
    if not wrong:
        modelport(["sample", str(model / "2")])
    return model / "1", model / "2"


def judged(case: str, limits: Slo, seed: int) -> tuple[GateDecision, tuple[PairedRound, ...]]:
    """One gate of ``case``, and its rounds."""
    spoiled, seen = CASES.get(case), [gate.GateSnapshot(0.0, (), ())]
    with contextlib.ExitStack() as stack:
        given = [str(FRAUD), str(FRAUD)]
        if case in (AGAIN, AGAIN_WRONG):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            given = [str(one) for one in retrained(folder, wrong=case == AGAIN_WRONG)]
        if spoiled is not None:
            given = stack.enter_context(proxies((), spoiled))
        one, other = map(baseline_and_candidate.side, given)
        asked = gate.GateRequest(one, other, limits, LoadTestProtocol.OIP_HTTP_BINARY, seed=seed)
        decision = gate.judge(asked, watch=seen.append)
    return decision, seen[-1].rounds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.loadtests.gating.real")
    parser.add_argument("--cases", nargs="+", choices=ALL_CASES, default=ALL_CASES)
    parser.add_argument("--gates", type=int, default=3, metavar="N", help="of each case")
    parser.add_argument("--seconds", type=float, default=90.0, metavar="N", help="of one, at most")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N")
    parser.add_argument(
        "--record",
        type=Path,
        nargs="?",
        const=simulation.RECORDED,
        metavar="FILE.npz",
        help="add the rounds of identical builds  [default: those of gate-statistics]",
    )
    parser.add_argument("--to", type=Path, metavar="FILE.jsonl", help="add the verdicts to a file")
    options = parser.parse_args()
    with Progress() as progress:
        task = progress.add_task("gates", total=options.gates * len(options.cases))
        for seed in range(options.gates):
            for case in options.cases:
                progress.update(task, description=case)
                decision, rounds = judged(
                    case, slo(options.seconds, options.batch_size), int(time.time()) + seed
                )
                row = {"case": case, "rounds": len(rounds)} | _row(decision, rounds)
                print(json.dumps(row), flush=True)
                if options.to:
                    with options.to.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                if options.record and case.startswith("identical, fresh"):
                    _record(rounds, options.record)
                progress.advance(task)
    return 0


def _row(decision: GateDecision, rounds: Sequence[PairedRound]) -> dict[str, object]:
    seen = {
        question.name: [change(value) for value in (question.change, question.low, question.high)]
        for question in decision.questions
        if question.relative and question.change and question.low and question.high
    }
    quantiles = {
        f"p{100 * q:g}": [
            round(
                float(
                    np.quantile(one.candidate.latencies_ms, q)
                    / np.quantile(one.baseline.latencies_ms, q)
                ),
                3,
            )
            for one in rounds
        ]
        for q in (0.5, 0.99)
    }
    failed = [one.name for one in decision.questions if one.status == "fail"]
    return {
        "verdict": str(decision.status),
        "failed": failed,
        "seen": seen,
        "each_round": quantiles,
        "requests": [len(one.baseline.latencies_ms) for one in rounds],
        "seconds": round(decision.seconds),
        "said": [one.detail for one in decision.questions if one.name == "measurement"],
    }


def _record(rounds: Sequence[PairedRound], path: Path) -> None:
    """Add them to ``path``: microseconds of either side, and its seconds to the first response.

    Without rounds that are too few requests for a p99 of their own.
    """
    arrays: dict[str, np.ndarray] = {}
    if path.exists():
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
    for one in rounds:
        number, halves = len(arrays) // 3, (one.baseline, one.candidate)
        if min(len(half.latencies_ms) for half in halves) < LEAST_REQUESTS:
            continue
        for name, half in zip("ab", halves, strict=True):
            arrays[f"{name}_{number}"] = np.rint(1e3 * half.latencies_ms).astype("u4")
        arrays[f"first_{number}"] = np.array([half.first_response_seconds for half in halves])
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]  # its other keywords are bool


if __name__ == "__main__":
    raise SystemExit(main())
