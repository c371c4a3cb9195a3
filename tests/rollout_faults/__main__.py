"""Rollouts with faults at random moments, under load: ``make rollout-faults``.

Exits with 1 where a rollout breaks a promise, or where a known-bad gateway is not caught.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from tests.rollout_faults import fleet, stopped_gateway
from tests.rollout_faults.scenario import FaultScenario, RolloutFault, ScenarioResult, run

#: The scenario that catches each known-bad gateway, and a word of the violation.
_GOOD = FaultScenario(0, RolloutFault.NONE, 1, "2", commanded=False, stage=1, delay=0.2)
_COMMANDED = replace(_GOOD, commanded=True)
KNOWN_BAD: dict[str, tuple[FaultScenario, str]] = {
    "ignores_the_stop": (_COMMANDED, "after the rollback"),
    "lets_some_through": (replace(_COMMANDED, keep=True), "after the rollback"),
    "forgets_the_key": (replace(_COMMANDED, sticky=True, delay=1.0), "changed sides"),
    "diverts_no_label": (replace(_COMMANDED, label=True, delay=1.0), "for the label"),
    "begins_again": (replace(_COMMANDED, fault=RolloutFault.KILL_GATEWAY), "after it"),
    "forgets_counts": (
        replace(_COMMANDED, fault=RolloutFault.KILL_GATEWAY, delay=1.5), "counts older",
    ),
    "forgets_the_verdict": (_COMMANDED, "the history has"),
    "leaves_failures_to_the_client": (
        replace(_COMMANDED, fault=RolloutFault.KILL_BACKEND, candidate="remote", commanded=False),
        "lost",
    ),
    "names_the_baseline": (_COMMANDED, "answered wrongly"),
    "diverts_named_versions": (_COMMANDED, "answered wrongly"),
}  # fmt: skip


def caught(variant: str) -> tuple[bool, ScenarioResult]:
    """Whether the known-bad gateway is caught, by the check that is there for it."""
    scenario, word = KNOWN_BAD[variant]
    result = run(replace(scenario, variant=variant))
    return any(word in each for each in result.violations), result


def table(results: list[ScenarioResult]) -> Table:
    """The figures, by fault."""
    found = Table("fault", "rollouts", "requests", "by the candidate", "cut off and made again",
                  "refused and made again", "promoted", "rolled back", "violations")  # fmt: skip
    for fault in RolloutFault:
        rows = [each for each in results if each.scenario.fault is fault]
        if not rows:
            continue
        phases = [each.phase for each in rows]
        figures = (
            len(rows), sum(each.requests for each in rows),
            sum(each.candidate_answers for each in rows), sum(each.in_flight for each in rows),
            sum(each.refused for each in rows), phases.count("promoted"),
            phases.count("rolled back"), sum(bool(each.violations) for each in rows),
        )  # fmt: skip
        found.add_row(str(fault), *map(str, figures))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rollout_faults", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--without-known-bad", action="store_true")
    options = parser.parse_args()
    results, missed = [], []
    for number in range(options.rollouts):
        scenario = FaultScenario.drawn(options.seed + number)
        result = run(scenario)
        results.append(result)
        print(
            f"{number + 1}/{options.rollouts} seed {scenario.seed}: {scenario.fault}, "
            f"{scenario.workers} process(es), candidate {scenario.candidate}, stage "
            f"{scenario.stage}: {result.phase}, {result.requests} requests, "
            f"{result.seconds:.0f} s: {result.violations or 'holds'}",
            flush=True,
        )
    for variant in () if options.without_known_bad else KNOWN_BAD:
        found, result = caught(variant)
        missed += [] if found else [variant]
        print(f"known-bad: {variant}: {'caught' if found else 'MISSED'}: {result.violations[:1]}")
    late = stopped_gateway.run()
    print(f"a gateway that is stopped beyond its lease: {late or 'holds'}")
    if not options.without_known_bad:
        caught_late = stopped_gateway.run("has_no_lease")
        missed += [] if caught_late else ["has_no_lease"]
        print(f"known-bad: has_no_lease: {'caught' if caught_late else 'MISSED'}")
    shared = fleet.run()
    print(
        f"three gateways on one repository: {shared.killed} leaders killed, {shared.requests} "
        f"requests, two stages at once for {shared.split_seconds:.1f} s at most, others stopped "
        f"{shared.late_seconds:.1f} s after the rollback: {shared.violations or 'holds'}"
    )
    width = None if os.isatty(1) else 150
    Console(width=width).print(table(results))
    return bool(missed or late or shared.violations) or any(each.violations for each in results)


if __name__ == "__main__":
    sys.exit(main())
