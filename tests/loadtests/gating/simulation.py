"""Gates on simulated releases: latencies as a shared machine makes them.

One model of a machine, and both ways of loading it. A round is a row of request slots; what the
machine does belongs to the *slot*, and so to whoever is asked in it: its speed wanders (AR(1) from
slot to slot, and slower from slice to slice), and neighbours come in bursts, in which all is slower
and some requests wait for a time slice. What a side does belongs to the *side*: noise and a heavy
tail (Pareto, shape 2.5) of every request's own, and a level and a tail of every start of a
process's own. Requests differ in size, and both sides are asked the same ones in the same order.

The two ways of loading differ only in which slots a side gets: turns A B B A request by request, or
slices A B B A of a quarter of the round each. Seeded throughout.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
from scipy.signal import lfilter

from modelport.gateway.slo import DurationSettings, Slo
from modelport.loadtests.checks import CheckStatus
from modelport.loadtests.confidence_intervals import Floats
from modelport.loadtests.gate.criteria import PairedRound, SideMeasurements
from modelport.loadtests.gate.decision import Looks

#: Rounds of a real gate of identical builds; see ``recorded``.
RECORDED = Path(__file__).with_name("recorded.npz")
#: Slices of a round, both sides together, and their length: the gate's defaults.
SLICES = 2 * DurationSettings().slices
SLICE_SECONDS = DurationSettings().slice_seconds
#: Different requests, and the standard deviation of the logarithm of their work.
REQUESTS, SIZES = 512, 0.45
#: Of a slot's wandering speed, with its predecessor's.
SLOT_CORRELATION = 0.9
#: Of a slice's drift, with its predecessor's.
SLICE_CORRELATION = 0.9
#: One request in so many falls into the heavy tail, of this shape.
TAIL_REQUESTS, TAIL_SHAPE = 70, 2.5
#: In a burst, so many of the requests wait, for about so long.
PREEMPTED, PREEMPTION_MS = 0.25, 4.0


class Loading(StrEnum):
    """The slots of a round in which a side is asked."""

    TURNS = "in turn"
    SLICES = "in slices"


@dataclass(frozen=True)
class Machine:
    """The noise of a machine, as standard deviations of logarithms unless stated otherwise."""

    name: str = "shared"
    #: From one slice to the next.
    drift: float = 0.05
    #: From slot to slot, of the machine; and of each request by itself.
    wander: float = 0.10
    own: float = 0.3
    #: Of one start of a process: its speed, and how often it falls into the tail.
    start: float = 0.02
    start_tail: float = 0.3
    #: How many bursts begin in a round.
    bursts: float = 1.0
    cold: float = 0.08
    #: Of the median request, alone.
    request_ms: float = 3.0

    @property
    def slots(self) -> int:
        """The slots of one round."""
        each = SLICES * 2
        return int(SLICES * SLICE_SECONDS * 1e3 / self.request_ms) // each * each


QUIET = Machine("quiet", 0.01, 0.03, own=0.15, start=0.005, start_tail=0.1, bursts=0.05)
SHARED = Machine()
ROUGH = Machine("rough", 0.15, 0.2, own=0.4, start=0.05, start_tail=0.9, bursts=8.0, cold=0.2)


@dataclass(frozen=True)
class Release:
    """The differences of the candidate."""

    name: str = "identical"
    #: The slowest 3 % take that many times as long, and with them the p99.
    tail: float = 1.0
    everything: float = 1.0
    wrong: float = 0.0
    errors: float = 0.0
    cold: float = 1.0


IDENTICAL = Release()
SLOWER_TAIL = Release("p99 +15 %", tail=1.15)
SLIGHTLY_SLOWER_TAIL = Release("p99 +5 %", tail=1.05)
SLOWER = Release("all +15 %", everything=1.15)
WRONG = Release("1 % wrong", wrong=0.01)
RELEASES = (IDENTICAL, SLIGHTLY_SLOWER_TAIL, SLOWER_TAIL, SLOWER, WRONG)


@dataclass
class Tally:
    """Verdicts, and the rounds that they took."""

    counts: dict[CheckStatus, int] = field(default_factory=lambda: dict.fromkeys(CheckStatus, 0))
    rounds: int = 0

    @property
    def gates(self) -> int:
        return sum(self.counts.values())

    def share(self, status: CheckStatus) -> float:
        return self.counts[status] / self.gates

    def add(self, other: Tally) -> None:
        for status, count in other.counts.items():
            self.counts[status] += count
        self.rounds += other.rounds


def simulated(
    machine: Machine, loading: Loading, generator: np.random.Generator
) -> Iterator[PairedRound]:
    """One round of identical builds after the other; who begins alternates."""
    sizes = np.exp(generator.normal(0, SIZES, REQUESTS))
    drift = np.zeros(1)
    for number in itertools.count():
        drift = next_drift(drift[-1], machine, generator)
        speed, pressed = moments(machine, drift, generator)
        asked = order(loading, machine.slots, number)
        colds = 1.5 * np.exp(drift[0] + generator.normal(0, machine.cold, 2))
        yield PairedRound(
            *(
                _half(
                    latencies_of(
                        machine, speed[asked == side], pressed[asked == side], sizes, generator
                    ),
                    colds[side],
                )
                for side in (0, 1)
            )
        )


def order(loading: Loading, slots: int, number: int) -> np.ndarray:
    """[slots]: which side is asked, 0 or 1, in round ``number``: A B B A, or B A A B."""
    turns = np.array([0, 1, 1, 0]) ^ (number % 2)
    if loading is Loading.TURNS:
        return np.resize(turns, slots)
    return np.repeat(np.resize(turns, SLICES), slots // SLICES)


def next_drift(last: float, machine: Machine, generator: np.random.Generator) -> Floats:
    """[slices + 1]: the machine's level where each slice begins, and where the last ends."""
    found = [last]
    for step in generator.normal(0, machine.drift, SLICES):
        found.append(SLICE_CORRELATION * found[-1] + step)
    return np.array(found)


def moments(
    machine: Machine, drift: Floats, generator: np.random.Generator
) -> tuple[Floats, np.ndarray]:
    """[slots]: the logarithm of how slow the machine is, and whether a neighbour presses."""
    count, rho = machine.slots, SLOT_CORRELATION
    noise = generator.standard_normal(count)
    noise[0] /= np.sqrt(1 - rho**2)
    wander = lfilter([np.sqrt(1 - rho**2)], [1, -rho], noise)
    speed = np.interp(np.arange(count), np.linspace(0, count, len(drift)), drift)
    speed += machine.wander * wander
    pressed = np.zeros(count, bool)
    for _ in range(generator.poisson(machine.bursts)):
        begin = int(generator.integers(count))
        seconds = generator.lognormal(np.log(0.3), 1.0)
        during = slice(begin, begin + 1 + int(1e3 * seconds / machine.request_ms))
        speed[during] += np.log(generator.uniform(1.1, 2))
        pressed[during] = True
    return speed, pressed


def latencies_of(
    machine: Machine,
    speed: Floats,
    pressed: np.ndarray,
    sizes: Floats,
    generator: np.random.Generator,
) -> Floats:
    """Milliseconds [requests] of a newly started process."""
    count = len(speed)
    level = generator.normal(0, machine.start) + generator.normal(0, machine.own, count)
    found = machine.request_ms * np.resize(sizes, count) * np.exp(speed + level)
    often = np.exp(generator.normal(0, machine.start_tail)) / TAIL_REQUESTS
    slow = np.flatnonzero(generator.random(count) < often)
    found[slow] *= 1 + generator.pareto(TAIL_SHAPE, len(slow))
    waits = np.flatnonzero(pressed & (generator.random(count) < PREEMPTED))
    found[waits] += generator.exponential(PREEMPTION_MS, len(waits))
    return np.asarray(found, np.float64)


def _half(latencies: Floats, cold: float) -> SideMeasurements:
    return SideMeasurements(latencies, 0.9 * latencies, len(latencies), 0, 0, 0.95 * cold, cold)


def released(rounds: Sequence[PairedRound], release: Release, seed: int) -> list[PairedRound]:
    """``rounds`` with another candidate."""
    generator = np.random.default_rng(seed)
    return [replace(one, candidate=_changed(one.candidate, release, generator)) for one in rounds]


def _changed(
    half: SideMeasurements, release: Release, generator: np.random.Generator
) -> SideMeasurements:
    latencies = half.latencies_ms * release.everything
    if release.tail != 1:
        latencies[latencies > np.quantile(latencies, 0.97)] *= release.tail
    assert half.cold_start_seconds is not None
    assert half.first_response_seconds is not None
    return replace(
        half,
        latencies_ms=latencies,
        first_bytes_ms=0.9 * latencies,
        wrong=int(generator.binomial(half.asked, release.wrong)),
        errors=int(generator.binomial(half.asked, release.errors)),
        cold_start_seconds=half.cold_start_seconds * release.cold,
        first_response_seconds=half.first_response_seconds * release.cold,
    )


def recorded(path: Path, generator: np.random.Generator) -> Iterator[PairedRound]:
    """Rounds of real gates of one version against itself, drawn with replacement.

    Which side was which is as exchangeable as the builds: it is drawn too.
    """
    rounds = read(path)
    while True:
        one = rounds[int(generator.integers(len(rounds)))]
        swapped = bool(generator.integers(2))
        yield PairedRound(one.candidate, one.baseline) if swapped else one


@functools.cache
def read(path: Path) -> tuple[PairedRound, ...]:
    """Rounds that ``tests.loadtests.gating.real --record`` kept, asked in turn."""
    with np.load(path) as file:
        return tuple(
            PairedRound(
                *(
                    _half(1e-3 * file[f"{side}_{number}"].astype(np.float64), cold)
                    for side, cold in zip("ab", file[f"first_{number}"], strict=True)
                )
            )
            for number in range(len(file.files) // 3)
        )


def gate(rounds: Sequence[PairedRound], slo: Slo) -> tuple[CheckStatus, int]:
    """The verdict on as many rounds at most, and how many it took."""
    looks = Looks(slo)
    for number in range(1, len(rounds) + 1):
        if looks.at(rounds[:number], number / len(rounds)):
            return looks.status, number
    raise AssertionError("the last look ends a gate")


def gates(
    streams: Callable[[np.random.Generator], Iterator[PairedRound]],
    slo: Slo,
    *,
    releases: Sequence[Release],
    most_rounds: Sequence[int],
    count: int,
    seed: int = 0,
) -> dict[tuple[Release, int], Tally]:
    """``count`` gates of every release and length, by both.

    Each is on rounds of its own; the releases and lengths of one number are on the same ones.
    """
    tallies = {(one, most): Tally() for one in releases for most in most_rounds}
    for number, generator in enumerate(np.random.default_rng(seed).spawn(count)):
        identical = list(itertools.islice(streams(generator), max(most_rounds)))
        for release in releases:
            rounds = released(identical, release, seed + number)
            for most in most_rounds:
                status, taken = gate(rounds[:most], slo)
                tally = tallies[release, most]
                tally.counts[status] += 1
                tally.rounds += taken
    return tallies
