"""Error rates of the gate, on simulated and on recorded releases: ``make gate-statistics``.

Simulated machines are quiet, shared or rough, and asked in turn (what the gate does with one user
and no rate) or in slices; recorded rounds are of real gates of identical builds, in turn. Every row
counts whole gates with their looks. Gates of identical builds are the most: how seldom they fail is
what is promised. Rows of one machine and loading rest on the same rounds.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

from rich.progress import track

from modelport.gateway.slo import Slo
from modelport.loadtests import confidence_intervals
from modelport.loadtests.checks import CheckStatus
from tests.loadtests.gating import simulation
from tests.loadtests.gating.simulation import (
    IDENTICAL,
    QUIET,
    RECORDED,
    RELEASES,
    ROUGH,
    SHARED,
    WRONG,
    Loading,
    Machine,
    Release,
    Tally,
)

MINUTES = (2.0, 5.0, 10.0, 20.0)
#: Of a round with the defaults; every slice has a load generator of its own, which must start.
ROUND_SECONDS = {Loading.TURNS: 15, Loading.SLICES: 25}
#: Gates of one piece of work for a process.
PORTION = 20
WHERE: dict[str, Machine | None] = {"quiet": QUIET, "shared": SHARED, "rough": ROUGH}
WHERE["recorded"] = None
#: What a gate with the confidence of 0.95 may be wrong in.
ALLOWED = 0.05
#: That a share of just so many is taken for more.
CHANCE = 0.01
Cell = tuple[str, Loading, Release, int]


def portion(
    where: str,
    loading: Loading,
    releases: tuple[Release, ...],
    rounds: tuple[int, ...],
    count: int,
    seed: int,
) -> dict[Cell, Tally]:
    """``count`` gates of each of ``releases``, of every length."""
    machine = WHERE[where]
    if machine is None:
        streams = functools.partial(simulation.recorded, RECORDED)
    else:
        streams = functools.partial(simulation.simulated, machine, loading)
    found = simulation.gates(
        streams, Slo(), releases=releases, most_rounds=rounds, count=count, seed=seed
    )
    return {(where, loading, *which): tally for which, tally in found.items()}


def rounds_of(loading: Loading, minutes: float) -> int:
    """The rounds that fit."""
    return round(60 * minutes / ROUND_SECONDS[loading])


def tallies(
    places: list[str], minutes: Sequence[float], count: int, seed: int
) -> dict[Cell, Tally]:
    """All gates of all cells, on as many cores as there are."""
    pieces = [
        (
            where,
            loading,
            RELEASES if 2 * begin < count else (IDENTICAL,),
            tuple(rounds_of(loading, one) for one in minutes),
            min(PORTION, count - begin),
            seed + begin,
        )
        for begin in range(0, count, PORTION)
        for where in places
        for loading in Loading
        if WHERE[where] is not None or loading is Loading.TURNS
    ]
    found: dict[Cell, Tally] = defaultdict(Tally)
    with ProcessPoolExecutor(os.cpu_count() or 1) as pool:
        waiting = [pool.submit(portion, *piece) for piece in pieces]
        for one in track(waiting, "gates"):
            for cell, tally in one.result().items():
                found[cell].add(tally)
    return found


def broken(found: Mapping[Cell, Tally]) -> list[str]:
    """The promises of the gate that these results break."""
    lines = []
    for (where, loading, release, most), tally in found.items():
        named = f"broken: {where}, {loading}, {most} rounds: '{release.name}'"
        failed, passed = tally.share(CheckStatus.FAIL), tally.share(CheckStatus.PASS)
        if release == IDENTICAL and failed > ALLOWED:
            lines.append(f"{named} failed in {failed:.1%}")
        # On the limit it is 5 % that may pass: only more than chance makes of it counts.
        passes = confidence_intervals.share(
            [tally.counts[CheckStatus.PASS]], [tally.gates], 1 - 2 * CHANCE
        )
        if release != IDENTICAL and passes.lower > ALLOWED:
            lines.append(f"{named} passed in {passed:.1%}")
        if release == WRONG and failed < 1 - ALLOWED:
            lines.append(f"{named} failed in {failed:.1%} only")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.loadtests.gating", description=__doc__)
    parser.add_argument("--gates", type=int, default=400, metavar="N", help="of identical builds")
    parser.add_argument(
        "--minutes", type=float, nargs="+", default=MINUTES, metavar="N", help="at most"
    )
    parser.add_argument(
        "--machines", nargs="+", choices=list(WHERE), default=list(WHERE), metavar="NAME"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first gate")
    options = parser.parse_args()
    found = tallies(options.machines, options.minutes, options.gates, options.seed)
    order = sorted(
        found,
        key=lambda cell: (list(WHERE).index(cell[0]), cell[1], RELEASES.index(cell[2]), cell[3]),
    )
    titles = "machine, loaded, candidate, minutes, gates, pass, fail, inconclusive, rounds taken"
    print("|", titles.replace(", ", " | "), "|")
    print("|---|---|---" + "|--:" * 6 + "|")
    for cell in order:
        where, loading, release, most = cell
        shares = " | ".join(f"{100 * found[cell].share(status):.1f} %" for status in CheckStatus)
        gates, mean = found[cell].gates, found[cell].rounds / found[cell].gates
        minutes = f"{most * ROUND_SECONDS[loading] / 60:.0f}"
        cells = (where, loading, release.name, minutes, gates, shares, f"{mean:.1f} of {most}")
        print("|", " | ".join(map(str, cells)), "|")
    said = broken({cell: found[cell] for cell in order})
    print("\n".join(said))
    return 1 if said else 0


if __name__ == "__main__":
    raise SystemExit(main())
