"""Gates on real servers of the demo's fraud model: ``make gate-real``.

The same published version against itself, in processes of its own each round; and one running
gateway against itself behind two proxies, one of which raises the p99 by 15 % or spoils one answer
in a hundred. Counts are written as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.progress import Progress

from loadtests.environments import ROOT
from loadtests.gate import gate, sides
from loadtests.gate.criteria import half_of
from loadtests.gate.decision import Decision
from loadtests.gate.slo import Slo, parse
from loadtests.processes import HOST, free_ports, running
from loadtests.report.figures import change
from loadtests.serving.gateway import Gateway
from loadtests.serving.served import served
from loadtests.target import Protocol
from tests.loadtests.gating import simulation

CASES = {
    "identical, fresh processes": None,
    "identical, behind proxies": (),
    "p99 +15 %": ("--tail", "1.15"),
    "1 % wrong": ("--wrong", "0.01"),
}
FRAUD = ROOT / "model_repository" / "fraud"
#: Numbers kept of a half of a recorded round.
KEPT = 4000


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
        server = stack.enter_context(served(Gateway(model), work / "gateway"))
        upstream = server.targets[Protocol.OIP_HTTP].address
        addresses = [stack.enter_context(proxy(upstream, one, work)) for one in each]
        yield [f"http://{address}/v2/models/{model.name}" for address in addresses]


def judged(case: str, limits: Slo, seed: int) -> Decision:
    """One gate of ``case``."""
    spoiled = CASES[case]
    with contextlib.ExitStack() as stack:
        given = [str(FRAUD), str(FRAUD)]
        if spoiled is not None:
            given = stack.enter_context(proxies((), spoiled))
        one, other = map(sides.side, given)
        return gate.judge(gate.Asked(one, other, limits, Protocol.OIP_HTTP_BINARY, seed=seed))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.loadtests.gating.real")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--gates", type=int, default=3, metavar="N", help="of each case")
    parser.add_argument("--seconds", type=float, default=90.0, metavar="N", help="of one, at most")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N")
    parser.add_argument("--record", action="store_true", help="keep the rounds of identical builds")
    parser.add_argument("--to", type=Path, metavar="FILE.json", help="add the verdicts to a file")
    options = parser.parse_args()
    found: list[dict[str, object]] = []
    halves = []
    with Progress() as progress:
        task = progress.add_task("gates", total=options.gates * len(options.cases))
        for seed in range(options.gates):
            for case in options.cases:
                progress.update(task, description=case)
                decision = judged(
                    case, slo(options.seconds, options.batch_size), int(time.time()) + seed
                )
                found.append({"case": case, "rounds": decision.rounds} | _row(decision))
                print(json.dumps(found[-1]), flush=True)
                if case.startswith("identical, fresh"):
                    halves += _rounds(decision)
                progress.advance(task)
    if options.record and halves:
        _record(halves)
    if options.to:
        before = json.loads(options.to.read_text()) if options.to.exists() else []
        options.to.write_text(json.dumps(before + found, indent=1))
    return 0


def _row(decision: Decision) -> dict[str, object]:
    seen = {
        question.name: [change(value) for value in (question.change, question.low, question.high)]
        for question in decision.questions
        if question.relative and question.change and question.low and question.high
    }
    quantiles = {
        f"p{100 * q:g}": [
            round(float(np.quantile(other, q) / np.quantile(one, q)), 3)
            for one, other in _rounds(decision)
        ]
        for q in (0.5, 0.99)
    }
    failed = [one.name for one in decision.questions if one.status == "fail"]
    return {
        "verdict": str(decision.status),
        "failed": failed,
        "seen": seen,
        "each_round": quantiles,
        "seconds": round(decision.seconds),
        "said": [one.detail for one in decision.questions if one.name == "measurement"],
    }


def _rounds(decision: Decision) -> list[tuple[np.ndarray, np.ndarray]]:
    """[(baseline, candidate)] milliseconds, of every round."""
    sides_ = (decision.baseline_runs, decision.candidate_runs)
    each = len(sides_[0]) // max(1, decision.rounds)
    found = []
    for begin in range(0, len(sides_[0]), max(1, each)):
        one, other = (half_of(runs[begin : begin + each]).latencies_ms for runs in sides_)
        found.append((one[:KEPT], other[:KEPT]))
    return found


def _record(rounds: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Add them to those that the simulation draws from."""
    arrays: dict[str, np.ndarray] = {}
    if simulation.RECORDED.exists():
        with np.load(simulation.RECORDED) as file:
            arrays = {name: file[name] for name in file.files}
    for number, (one, other) in enumerate(rounds, len(arrays) // 2):
        arrays |= {f"a_{number}": one.astype("f4"), f"b_{number}": other.astype("f4")}
    np.savez_compressed(simulation.RECORDED, **arrays)


if __name__ == "__main__":
    raise SystemExit(main())
