"""The measured loads of a comparison, with the candidates that ran each, in every round."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from modelport.loadtests import number_format
from modelport.loadtests.compare.result import Candidate, Measured

#: Most plots of one kind; the table has every load.
MOST_SHARED = 6


@dataclass(frozen=True)
class LoadKey:
    """The properties that comparable runs share."""

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


#: Runs by load and candidate's number, one for each round.
Loads = Mapping[LoadKey, Mapping[int, Sequence[Measured]]]


def by_load(candidates: Sequence[Candidate]) -> Loads:
    """Group the runs by load, lighter loads first; numbers count from 1.

    A candidate without the common protocol appears with its own first protocol, which
    ``other_protocols`` lists.
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


def other_protocols(load: LoadKey, runs: Mapping[int, Sequence[Measured]]) -> dict[int, str]:
    """Protocols of the candidates that used another than the load's, by number."""
    first = {number: rounds[0].protocol for number, rounds in runs.items()}
    return {number: protocol for number, protocol in first.items() if protocol != load.protocol}


def _common(candidates: Sequence[Candidate]) -> str:
    """The protocol of most candidates; among equals, the first."""
    spoken = Counter(
        protocol
        for candidate in candidates
        for protocol in dict.fromkeys(run.protocol for run in candidate.runs)
    )
    return max(spoken, key=lambda protocol: spoken[protocol], default="")


def shared(loads: Loads) -> Loads:
    """The loads of most candidates; the probes of a search are seldom alike."""
    most = max((len(runs) for runs in loads.values()), default=0)
    found = [load for load, runs in loads.items() if len(runs) > most / 2]
    if len(found) > MOST_SHARED:
        size = {load: (len(loads[load]), sum(map(len, loads[load].values()))) for load in found}
        kept = sorted(found, key=lambda load: size[load], reverse=True)[:MOST_SHARED]
        found = [load for load in found if load in kept]
    return {load: loads[load] for load in found}


def typical(runs: Sequence[Measured]) -> Measured:
    """The round with the median p99, for an even number the slower one of the middle two."""
    middle = statistics.median_high(run.latency.p99 for run in runs)
    return next(run for run in runs if run.latency.p99 == middle)
