"""The demo's model in several formats, one of them made slow and one made wrong: are they found?

    python -m tests.loadtests.comparing        # make compare-faults

Exports the fraud checkpoint (trained where it is not there yet), serves it by real backends, with
a proxy before two of them: one delays every answer, one falsifies one of a hundred. Exits with 1
unless the slow one is ranked last by far, named, and not disqualified, and the wrong one is
disqualified and wins nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from modelport.loadtests.compare import models_to_compare
from modelport.loadtests.compare.comparison_run import (
    ComparisonRun,
    ComparisonSubject,
)
from modelport.loadtests.compare.models_to_compare import ComparisonRequest
from modelport.loadtests.compare.result import Comparison
from modelport.loadtests.compare.rounds import RoundSettings
from tests import verb
from tests.loadtests.proxy import Behind

CHECKPOINT = Path("checkpoints/fraud.pt")
FORMATS = ("onnx", "torchscript", "tflite", "tflite:int8")
BACKENDS = ("onnxruntime", "pytorch", "tflite")
SLOW, WRONG = "tflite fp32 · LiteRT", "onnx fp32 · ONNX Runtime"
#: Far above what a machine that has other work does to a p99.
DELAY_MS, WRONG_EVERY = 400.0, 100


def problems(result: Comparison) -> Iterator[str]:
    found = {candidate.name: candidate for candidate in result.candidates}
    if "wrong" not in (found[WRONG].disqualified or ""):
        yield f"{WRONG} answers wrongly and is not disqualified: {found[WRONG].disqualified}"
    for name, candidate in found.items():
        if name != WRONG and candidate.disqualified:
            yield f"{name} is disqualified: {candidate.disqualified}"
    for verdict in result.matrix:
        if WRONG in [name for name, _, _ in verdict.ranking]:
            yield f"{WRONG} is ranked in {verdict.concern}"
    for verdict in result.matrix[:2]:
        if verdict.ranking[-1][0] != SLOW:
            yield f"{verdict.concern}: the last is {verdict.ranking[-1][0]}, not {SLOW}"
    if f"far behind: {SLOW}" not in result.matrix[0].note:
        yield f"{SLOW} is not named: {result.matrix[0].note}"


def compare(work: Path) -> Comparison:
    wanted = ComparisonRequest(FORMATS, BACKENDS, requests=64, seed=0)
    given = models_to_compare.checkpoint(CHECKPOINT, None, None, None)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    lineup = models_to_compare.from_checkpoint(
        given, wanted, cache / "modelport" / "compare", work, print
    )
    for contender in lineup.contenders:
        if contender.name == SLOW:
            contender.backend = Behind(contender.backend, delay_ms=DELAY_MS)
        if contender.name == WRONG:
            contender.backend = Behind(contender.backend, wrong_every=WRONG_EVERY)
    cores = sorted(os.sched_getaffinity(0))
    apart = len(cores) > 1
    shootout = ComparisonRun(
        subject=ComparisonSubject(lineup.model, lineup.source),
        contenders=lineup.contenders,
        absent=lineup.absent,
        settings=RoundSettings(
            users=(1, 8),
            probes=1,
            slo_p99_ms=1000.0,
            server_cores=tuple(cores[:-1]) if apart else (),
            client_core=cores[-1] if apart else None,
        ),
        rounds=2,
        work=work,
        ends_at=time.monotonic() + 600,
    )

    def tell(what: str, done: int, total: int) -> None:
        print(f"{done:3} of {total}  {what}", flush=True)

    shootout.run(tell)
    return shootout.result()


def main() -> int:
    if not CHECKPOINT.exists():
        subprocess.run([sys.executable, "-m", "modelport", "demo"], check=True)
    with tempfile.TemporaryDirectory() as work:
        result = compare(Path(work))
    for verdict in result.matrix[:2]:
        print(f"\n{verdict.concern}: {verdict.note}")
        for name, _, spread in verdict.ranking:
            print(f"  {spread:32} {name}")
    for candidate in result.candidates:
        if candidate.disqualified:
            print(f"\ndisqualified: {candidate.name}: {candidate.disqualified}")
    found = list(problems(result))
    for problem in found:
        print(f"WRONG: {problem}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    verb.run(main)
