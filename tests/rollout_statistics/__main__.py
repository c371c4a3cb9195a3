"""Error rates of rollouts, and the traffic that they need: ``make rollout-statistics``.

Each row is a number of whole rollouts on simulated traffic, looked at after every request. The
known-bad variants are wrong in the same traffic, and must be seen to be.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import track

from modelport.gateway.rollout.plan import AssignmentKind, RolloutPlan
from modelport.gateway.rollout.statistics.decision import RolloutVerdict
from modelport.gateway.rollout.statistics.sequential_tests import TrialCounts, confidence_sequence
from tests.gateway.rollout import plans
from tests.loadtests.gating.simulation import QUIET, ROUGH
from tests.rollout_statistics import simulation
from tests.rollout_statistics.simulation import (
    AT_EVERY_LIMIT,
    BrokenCriterion,
    SimulatedCandidate,
    SimulatedRollout,
    Test,
    first_broken,
)

#: What a rollout with a confidence of 0.95 may be wrong in.
ALLOWED = 0.05
#: Requests per second, and those of 20 minutes and of the shortest stage of a minute.
RATE = 200
LONG, MINUTE = 20 * 60 * RATE, 60 * RATE
#: Rollouts of the first row; the others' number is a part of it.
ROLLOUTS = 2000
#: Rollouts of one piece of work for a process.
PORTION = 20

#: What became of one rollout: the criteria that it broke.
Found = dict[str, BrokenCriterion]


@dataclass(frozen=True)
class RolloutKind:
    """One kind of rollout, and what its results are held to."""

    name: str
    scenario: SimulatedRollout
    #: Part of ``ROLLOUTS``, unless ``--rollouts`` is given.
    part: float
    #: Text of the results, and whether they are as promised.
    judge: Callable[[Sequence[Found]], tuple[str, bool]]
    promised: str
    test: Test = first_broken
    #: Instead of a scenario: a whole rollout with errors only.
    plan: RolloutPlan | None = None


def rolled_back(found: Sequence[Found]) -> float:
    return sum(map(bool, found)) / len(found)


def seldom(found: Sequence[Found]) -> tuple[str, bool]:
    return f"{rolled_back(found):.2%} rolled back", rolled_back(found) <= ALLOWED


def often(found: Sequence[Found]) -> tuple[str, bool]:
    return f"{rolled_back(found):.1%} rolled back", rolled_back(found) > ALLOWED


def soon(most: int) -> Callable[[Sequence[Found]], tuple[str, bool]]:
    def judge(found: Sequence[Found]) -> tuple[str, bool]:
        trials = [one["disagreement"].trial if "disagreement" in one else np.inf for one in found]
        median, late = np.quantile(trials, (0.5, 0.95), method="higher")
        return f"median {median:,.0f} compared, 95 % within {late:,.0f}", bool(median <= most)

    return judge


def reached(least: float, before: int) -> Callable[[Sequence[Found]], tuple[str, bool]]:
    """The share of rollouts whose p99 was found; ``before`` requests of other stages."""

    def judge(found: Sequence[Found]) -> tuple[str, bool]:
        moments = [one["p99"].request - before if "p99" in one else np.inf for one in found]
        share = float(np.isfinite(moments).mean())
        minutes = float(np.quantile(moments, 0.5, method="higher")) / RATE / 60
        return f"{share:.1%} found, median {minutes:.1f} minutes", share >= least

    return judge


def before_a_quarter(least: float) -> Callable[[Sequence[Found]], tuple[str, bool]]:
    def judge(found: Sequence[Found]) -> tuple[str, bool]:
        share = sum("errors" in one for one in found) / len(found)
        requests = np.median([one["errors"].request for one in found if "errors" in one])
        return f"{share:.1%} before 25 %, median {requests:,.0f} requests", share >= least

    return judge


STICKY = plans.plan(shadow=0.1, assignment=AssignmentKind.HEADER)
STEPS = plans.plan(steps=(0.01, 0.05, 0.25, 1.0))
BAD = "known bad: more than 5 %"
FALSE = "at most 5 %"


def rows() -> Iterable[RolloutKind]:
    """Every row of the table."""
    yield RolloutKind("identical, shared machine", SimulatedRollout(), 1, seldom, FALSE)
    yield RolloutKind(
        "identical, quiet machine", SimulatedRollout(machine=QUIET), 0.25, seldom, FALSE
    )
    yield RolloutKind(
        "identical, rough machine", SimulatedRollout(machine=ROUGH), 0.25, seldom, FALSE
    )
    yield RolloutKind(
        "exactly at every limit, shared", SimulatedRollout(AT_EVERY_LIMIT), 1, seldom, FALSE
    )
    yield RolloutKind(
        "exactly at every limit, rough",
        SimulatedRollout(AT_EVERY_LIMIT, ROUGH),
        0.25,
        seldom,
        FALSE,
    )
    sticky = SimulatedRollout(plan=STICKY, keys=300)
    yield RolloutKind("identical, sticky by 300 keys", sticky, 0.25, seldom, FALSE)
    mends = SimulatedRollout(SimulatedCandidate(error_ratio=0.0), errors=0.1)
    yield RolloutKind("mends a baseline that fails in 10 %", mends, 0.25, seldom, FALSE)
    yield RolloutKind(
        "a fixed-sample test after every request",
        SimulatedRollout(AT_EVERY_LIMIT),
        0.05,
        often,
        BAD,
        simulation.repeated_fixed_sample_test,
    )
    yield RolloutKind(
        "latency as a rate over time, identical",
        SimulatedRollout(),
        0.05,
        often,
        BAD,
        simulation.rates_over_time,
    )
    yield RolloutKind(
        "every event of a sticky key, identical",
        sticky,
        0.05,
        often,
        BAD,
        simulation.every_event_of_a_key,
    )
    for share, requests, most in ((0.01, 30_000, 400), (0.003, 200_000, 4000)):
        scenario = SimulatedRollout(
            SimulatedCandidate(disagreement=share), requests=(requests, 1, 1, 1, 1)
        )
        title = f"{share:.1%} of the answers disagree, limit 0.1 %"
        yield RolloutKind(title, scenario, 0.5, soon(most), f"median at most {most:,}")
    for title, plan, least in (
        ("10 x the errors of 0.1 %, stages of 10 minutes", {"min_seconds": 600.0}, 0.95),
        ("10 x the errors of 0.1 %, shortest stages", {}, 0.75),
    ):
        yield RolloutKind(
            title,
            SimulatedRollout(),
            0.1,
            before_a_quarter(least),
            f"before 25 % in {least:.0%}",
            plan=plans.plan(steps=STEPS.steps, **plan),
        )
    slower = SimulatedCandidate(tail=1.15)
    for share, stages, least in (
        ("5 %", (MINUTE, LONG, 1, 1), 0.75),
        ("25 %", (MINUTE, MINUTE, LONG, 1), 0.99),
    ):
        yield RolloutKind(
            f"p99 +15 % at {share}, 20 minutes, shared",
            SimulatedRollout(slower, plan=STEPS, requests=stages),
            0.2,
            reached(least, sum(stages[: stages.index(LONG)])),
            f"found in {least:.0%}",
        )


def portion(number: int, count: int, seed: int) -> list[Found]:
    """``count`` rollouts of row ``number``."""
    row = list(rows())[number]
    if row.plan is None:
        return simulation.rollouts(row.scenario, count, seed, row.test)
    found = []
    for generator in np.random.default_rng(seed).spawn(count):
        ending = simulation.live(row.plan, 10.0, RATE, generator)
        caught = ending.verdict is RolloutVerdict.ROLLBACK and row.plan.steps[ending.stage] < 0.25
        found.append({"errors": BrokenCriterion(ending.requests, 0)} if caught else {})
    return found


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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rollout_statistics", description=__doc__)
    parser.add_argument("--rollouts", type=int, metavar="N", help="of every row")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has it")
    options = parser.parse_args()
    broken = 0
    print("| rollout | rollouts | result | promised | |\n|---|--:|---|---|---|", flush=True)
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
            text, kept = row.judge(found)
            broken += not kept
            end = f"{row.promised} | {'' if kept else 'NO'} |"
            print(f"| {row.name} | {len(found):,} | {text} | {end}", flush=True)
    difference = compared_with_ville(200, options.seed)
    print(f"largest difference from ville.BernoulliCS: {difference or 'ville is not installed'}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
