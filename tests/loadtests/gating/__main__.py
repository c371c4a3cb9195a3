"""How often the gate is wrong, on simulated releases: ``make gate-statistics``."""

from __future__ import annotations

import argparse
import functools
import os
from concurrent.futures import ProcessPoolExecutor

from rich.progress import track

from loadtests.gate.slo import Slo
from loadtests.report.checks import Status
from tests.loadtests.gating import simulation
from tests.loadtests.gating.simulation import QUIET, RELEASES, ROUGH, SHARED, Machine, Release

#: A round is about 25 s with the defaults: 2, 5, 10 and 20 minutes.
ROUNDS = (5, 12, 24, 48)
WHERE: dict[str, Machine | None] = {"quiet": QUIET, "shared": SHARED, "rough": ROUGH}
if simulation.RECORDED.exists():
    WHERE["recorded"] = None


def cell(
    machine: Machine | None, release: Release, most_rounds: int, count: int
) -> simulation.Tally:
    """``count`` gates; without a machine, on recorded rounds."""
    if machine is None:
        streams = functools.partial(simulation.recorded, simulation.RECORDED, release)
    else:
        streams = functools.partial(simulation.simulated, machine, release)
    return simulation.gates(streams, Slo(), count=count, most_rounds=most_rounds, seed=most_rounds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.loadtests.gating", description=__doc__)
    parser.add_argument("--gates", type=int, default=400, metavar="N", help="in every cell")
    parser.add_argument(
        "--rounds", type=int, nargs="+", default=ROUNDS, metavar="N", help="at most"
    )
    parser.add_argument(
        "--machines", nargs="+", choices=list(WHERE), default=list(WHERE), metavar="NAME"
    )
    options = parser.parse_args()
    cells = [
        (WHERE[name], release, rounds)
        for name in options.machines
        for release in RELEASES
        for rounds in options.rounds
    ]
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        waiting = [pool.submit(cell, *which, options.gates) for which in cells]
        tallies = [one.result() for one in track(waiting, "gates")]
    print("| where | candidate | rounds at most | pass | fail | inconclusive | rounds |")
    print("|---|---|---|---|---|---|---|")
    broken = []
    for (machine, release, rounds), tally in zip(cells, tallies, strict=True):
        where = "recorded rounds" if machine is None else machine.name
        shares = " | ".join(f"{tally.share(status):.1%}" for status in Status)
        mean = tally.rounds / tally.gates
        print(f"| {where} | {release.name} | {rounds} | {shares} | {mean:.1f} |")
        if release is simulation.IDENTICAL and tally.share(Status.FAIL) > 0.05:
            broken.append(f"{where}: {tally.share(Status.FAIL):.1%} of identical builds failed")
        if release.name != "identical" and tally.share(Status.PASS) > 0.05:
            broken.append(f"{where}: {tally.share(Status.PASS):.1%} of '{release.name}' passed")
    print("\n".join(broken))
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
