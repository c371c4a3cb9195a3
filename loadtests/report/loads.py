"""The measured loads of a comparison: which candidates bore which, in every round."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from modelport.loadtests.compare.result import Candidate, Measured
from modelport.loadtests.report import number_format

#: Plots of one kind, at most; every load is in the table.
MOST_SHARED = 6


@dataclass(frozen=True)
class LoadKey:
    """What runs must share to be compared."""

    protocol: str
    loop: str
    users: int
    rate: float | None

    @property
    def title(self) -> str:
        if self.rate is not None:
            rate = number_format.figure(self.rate)
            return f"{self.protocol}, open loop, {rate} requests/s intended"
        return f"{self.protocol}, closed loop, {self.users} in flight"

    def in_protocol(self, protocol: str) -> LoadKey:
        return replace(self, protocol=protocol)


#: Load → candidate's number → its runs, one for each round.
Loads = Mapping[LoadKey, Mapping[int, Sequence[Measured]]]


def by_load(candidates: Sequence[Candidate]) -> Loads:
    """Numbers count from 1 on, in the comparison's order; lighter loads first.

    A candidate that does not speak what most are asked in stands among them with its own first
    protocol; ``strangers`` names it.
    """
    common = _common(candidates)
    found: dict[LoadKey, dict[int, list[Measured]]] = {}
    for number, candidate in enumerate(candidates, start=1):
        spoken = list(dict.fromkeys(run.protocol for run in candidate.runs))
        instead = spoken[0] if spoken and common not in spoken else common
        for run in candidate.runs:
            protocol = common if run.protocol == instead else run.protocol
            load = LoadKey(protocol, run.loop, run.users, run.rate)
            found.setdefault(load, {}).setdefault(number, []).append(run)
    order = sorted(found, key=lambda k: (k.protocol, k.loop, k.rate or 0.0, k.users))
    return {load: found[load] for load in order}


def strangers(load: LoadKey, runs: Mapping[int, Sequence[Measured]]) -> dict[int, str]:
    """Number → protocol, of those that were asked in another than the load's."""
    first = {number: rounds[0].protocol for number, rounds in runs.items()}
    return {number: protocol for number, protocol in first.items() if protocol != load.protocol}


def _common(candidates: Sequence[Candidate]) -> str:
    """The protocol that most candidates were asked in; of several, the first asked."""
    spoken = Counter(
        protocol
        for candidate in candidates
        for protocol in dict.fromkeys(run.protocol for run in candidate.runs)
    )
    return max(spoken, key=lambda protocol: spoken[protocol], default="")


def shared(loads: Loads) -> Loads:
    """The loads that most candidates bore; the probes of a search for a rate are seldom alike."""
    most = max((len(runs) for runs in loads.values()), default=0)
    found = [load for load, runs in loads.items() if len(runs) > most / 2]
    if len(found) > MOST_SHARED:
        size = {load: (len(loads[load]), sum(map(len, loads[load].values()))) for load in found}
        kept = sorted(found, key=lambda load: size[load], reverse=True)[:MOST_SHARED]
        found = [load for load in found if load in kept]
    return {load: loads[load] for load in found}


def typical(runs: Sequence[Measured]) -> Measured:
    """The round whose p99 is the median, of an even number the slower: one that was, no mixture."""
    middle = statistics.median_high(run.latency.p99 for run in runs)
    return next(run for run in runs if run.latency.p99 == middle)
