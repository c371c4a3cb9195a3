"""Error rates of rollouts, and what they find: ``make rollout-statistics``.

Each row is a number of whole rollouts on simulated traffic, counted and decided as in the gateway.
The known-bad variants are wrong in the same traffic, and must be seen to be. ``--write`` replaces
the generated section of ``docs/rollout.md``.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from modelport.gateway.rollout.plan import AssignmentKind
from modelport.gateway.rollout.statistics.decision import RolloutVerdict
from modelport.gateway.rollout.statistics.sequential_tests import TrialCounts, confidence_sequence
from tests import verb
from tests.loadtests.gating.simulation import QUIET, ROUGH
from tests.rollout_statistics import simulation
from tests.rollout_statistics.simulation import (
    AT_EVERY_LIMIT,
    DEFAULT,
    RolloutEnding,
    SimulatedCandidate,
    SimulatedRollout,
)

#: What a rollout with a confidence of 0.95 may be wrong in.
ALLOWED = 0.05
#: Rollouts of the first row; the others' number is a part of it.
ROLLOUTS = 200
#: Rollouts of one piece of work for a process.
PORTION = 5
#: Requests until which the table says how many were rolled back.
COLUMNS = (20_000, 58_000)

PAGE = Path(__file__).parents[2] / "docs" / "rollout.md"
BEGIN, END = "<!-- make rollout-statistics: begin -->", "<!-- make rollout-statistics: end -->"

Judge = Callable[[Sequence[RolloutEnding]], bool]


@dataclass(frozen=True)
class RolloutKind:
    """One kind of rollout, and what its results are held to."""

    name: str
    scenario: SimulatedRollout
    judge: Judge
    promised: str
    #: Part of ``ROLLOUTS``, unless ``--rollouts`` is given.
    part: float = 0.5


def within(found: Sequence[RolloutEnding], requests: int) -> float:
    """The share that was rolled back within a number of requests."""
    return sum(one.rolled_back and one.requests <= requests for one in found) / len(found)


def seldom(found: Sequence[RolloutEnding]) -> bool:
    return sum(one.rolled_back for one in found) / len(found) <= ALLOWED


def often(found: Sequence[RolloutEnding]) -> bool:
    return not seldom(found)


def anything(_: Sequence[RolloutEnding]) -> bool:
    return True


def caught(least: float, requests: int = 10**9) -> Judge:
    return lambda found: within(found, requests) >= least


def in_shadow(least: float) -> Judge:
    return lambda found: sum(o.rolled_back and not o.stage for o in found) / len(found) >= least


def before_a_quarter(least: float) -> Judge:
    return lambda found: sum(o.rolled_back and o.stage < 3 for o in found) / len(found) >= least


STICKY = replace(DEFAULT, assignment=AssignmentKind.HEADER)
#: The default plan of earlier versions: stages end by a count, and only copies are compared.
BY_COUNT = replace(DEFAULT, power=0.0, min_requests=500, min_seconds=0.0, pair=0.0)
FALSE, BAD = "at most 5 % rolled back", "known bad: more than 5 % rolled back"


def identical() -> Iterator[RolloutKind]:
    """Candidates within every limit, and known-bad variants on the same traffic."""
    plain = SimulatedRollout()
    sticky = SimulatedRollout(plan=STICKY, keys=300)
    mends = SimulatedRollout(SimulatedCandidate(error_ratio=0.0), errors=0.1)
    at_limit = SimulatedRollout(AT_EVERY_LIMIT)
    yield RolloutKind("identical, shared machine", plain, seldom, FALSE, 1)
    for machine in (QUIET, ROUGH):
        scenario = replace(plain, machine=machine)
        yield RolloutKind(f"identical, {machine.name} machine", scenario, seldom, FALSE, 0.25)
    yield RolloutKind("exactly at every limit, shared", at_limit, seldom, FALSE, 0.5)
    rough = replace(at_limit, machine=ROUGH)
    yield RolloutKind("exactly at every limit, rough", rough, seldom, FALSE, 0.25)
    yield RolloutKind("identical, sticky by 300 keys", sticky, seldom, FALSE, 0.25)
    yield RolloutKind("mends a baseline that fails in 10 %", mends, seldom, FALSE, 0.25)
    for name, scenario in (
        ("a fixed-sample test at every look, at every limit",
         replace(at_limit, decide=simulation.repeated_fixed_sample_test)),
        ("latency as a rate over time, identical, rough",
         replace(plain, machine=ROUGH, decide=simulation.rates_over_time)),
        ("every request of a sticky key, identical", replace(sticky, ignores_keys=True)),
    ):  # fmt: skip
        yield RolloutKind(name, scenario, often, BAD, 0.2)


def harmful() -> Iterator[RolloutKind]:
    """Candidates that do harm, by kind and size."""

    def one(
        name: str, judge: Judge, promised: str, part: float = 0.5, **fields: float
    ) -> RolloutKind:
        scenario = SimulatedRollout(SimulatedCandidate(**fields), look=1000)  # type: ignore[arg-type]
        return RolloutKind(name, scenario, judge, promised, part)

    def found(least: float) -> tuple[Judge, str]:
        return caught(least, 58_000), f"{100 * least:g} % within 58,000"

    yield one("0.3 % wrong answers", anything, "", disagreement=0.003)
    yield one("0.5 % wrong answers", anything, "", disagreement=0.005)
    yield one("1 % wrong answers", in_shadow(0.95), "95 % in the shadow stage", disagreement=0.01)
    yield one("5 % wrong answers", in_shadow(0.95), "95 % in the shadow stage", disagreement=0.05)
    yield one("1 % wrong answers, to clients only", caught(0.95), "95 %", canary_disagreement=0.01)
    yield one("3 times the errors", anything, "", error_ratio=3.0)
    yield one("10 times the errors", before_a_quarter(0.9), "90 % before 25 %", error_ratio=10.0)
    yield one("p99 + 15 %", anything, "", tail=1.15)
    yield one("p99 + 50 %", *found(0.8), tail=1.5)
    yield one("p99 doubled", *found(0.95), tail=2.0)
    yield one("everything + 10 %", *found(0.8), everything=1.1)
    yield one("everything + 15 %", *found(0.95), everything=1.15)
    wrong = SimulatedCandidate(disagreement=0.01)
    by_count = SimulatedRollout(wrong, plan=BY_COUNT, look=1000)
    yield RolloutKind(
        "1 % wrong answers, stages that end by a count", by_count,
        lambda found: not caught(0.95)(found), "known bad: less than 95 %", 0.5,
    )  # fmt: skip


def rows() -> list[RolloutKind]:
    """Every row of the table."""
    return [*identical(), *harmful()]


def portion(number: int, count: int, seed: int) -> list[RolloutEnding]:
    """``count`` rollouts of row ``number``."""
    return simulation.rollouts(rows()[number].scenario, count, seed)


def cells(found: Sequence[RolloutEnding]) -> list[str]:
    """The results of one row."""
    promoted = sum(one.verdict is RolloutVerdict.PROMOTE for one in found) / len(found)
    back = [one for one in found if one.rolled_back]
    requests = f"{np.median([one.requests for one in back]):,.0f}" if back else "-"
    names = {name: sum(name in one.broken for one in back) for one in back for name in one.broken}
    named = max(names, key=lambda name: names[name]) if names else "-"
    shares = [within(found, each) for each in COLUMNS]
    return [*(f"{100 * share:.1f}" for share in (promoted, *shares)), requests, named]


def compared_with_ville(streams: int, seed: int) -> str | None:
    """The largest difference of a confidence sequence from the package ville's, if installed."""
    try:
        ville = importlib.import_module("ville")
    except ImportError:
        return None
    worst = 0.0
    for generator in np.random.default_rng(seed).spawn(streams):
        stream = generator.random(200) < generator.random()
        theirs = ville.BernoulliCS(0.05, (0.5, 0.5), intersect=False).fit(stream)
        for t in (1, 10, 50, 200):
            ours = confidence_sequence([TrialCounts(0.5, int(stream[:t].sum()), t)], 0.05)
            assert ours is not None
            lower, upper = (
                value / (1 + value) if np.isfinite(value) else 1.0 for value in ours[1:]
            )
            differences = (lower - theirs.lower_[t - 1], upper - theirs.upper_[t - 1])
            worst = max(worst, *map(abs, differences))
    return f"{worst:.1e}"


HEAD = (
    "| rollout | rollouts | promoted, % | rolled back within 20,000, % | within 58,000, % "
    "| median requests until then | mostly by | promised |\n|---|--:|--:|--:|--:|--:|---|---|"
)


def write(lines: Sequence[str]) -> None:
    """Replace the generated section of the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([before + BEGIN, *lines, END + after]), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rollout_statistics", description=__doc__)
    parser.add_argument("--rollouts", type=int, metavar="N", help="of every row")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has it")
    parser.add_argument("--write", action="store_true", help=f"the table into {PAGE.name}")
    options = parser.parse_args()
    broken, table = 0, [f"\nMade by `make rollout-statistics` at commit {verb.commit()}.\n", HEAD]
    print(HEAD, flush=True)
    with ProcessPoolExecutor(options.processes) as pool:
        for number, row in enumerate(rows()):
            if options.only not in row.name:
                continue
            count = options.rollouts or round(ROLLOUTS * row.part)
            pieces = [
                pool.submit(portion, number, min(PORTION, count - begin), options.seed + begin)
                for begin in range(0, count, PORTION)
            ]
            waiting = track(pieces, row.name, console=Console(stderr=True), transient=True)
            found = [one for piece in waiting for one in piece.result()]
            kept = row.judge(found)
            broken += not kept
            promised = row.promised if kept else f"NOT KEPT: {row.promised}"
            table.append("| " + " | ".join([row.name, str(count), *cells(found), promised]) + " |")
            print(table[-1], flush=True)
    difference = compared_with_ville(200, options.seed)
    print(f"largest difference from ville.BernoulliCS: {difference or 'ville is not installed'}")
    if options.write:
        write([*table, ""])
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
