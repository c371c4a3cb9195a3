"""Gates on simulated releases: latencies as a shared machine makes them.

A request's latency is lognormal and resembles its predecessor's (AR(1) within a slice); one in 70
falls into a heavy tail (Pareto, shape 2.5). The machine's speed wanders from slice to slice (AR(1)
over the whole gate), now and then a neighbour slows part of a slice, and every start of a process
has a speed of its own. Seeded throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy.signal import lfilter

from loadtests.gate.criteria import Half, Round
from loadtests.gate.looks import Looks
from loadtests.gate.slo import Slo
from loadtests.report.checks import Status
from loadtests.statistics import Floats

SLICES = 2
#: Requests that resemble their predecessor so much.
REQUEST_CORRELATION = 0.6
RECORDED = Path(__file__).with_name("recorded.npz")


@dataclass(frozen=True)
class Machine:
    """How noisy it is; standard deviations of logarithms."""

    name: str = "shared machine"
    drift: float = 0.05
    #: Of one start of a process.
    start: float = 0.03
    #: How likely a slice has a neighbour's burst in it.
    burst: float = 0.05
    cold: float = 0.08
    #: A model of 1.5 ms, asked by one user for 3 seconds.
    requests_a_slice: int = 2000


QUIET = Machine("quiet machine", drift=0.01, start=0.01, burst=0.01)
SHARED = Machine()
ROUGH = Machine("rough machine", drift=0.15, start=0.08, burst=0.15, cold=0.2)


@dataclass(frozen=True)
class Release:
    """What is different about the candidate."""

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
    """Verdicts, and the mean part of the duration that they took."""

    counts: dict[Status, int] = field(default_factory=lambda: dict.fromkeys(Status, 0))
    rounds: int = 0

    @property
    def gates(self) -> int:
        return sum(self.counts.values())

    def share(self, status: Status) -> float:
        return self.counts[status] / self.gates


def simulated(
    machine: Machine, release: Release, generator: np.random.Generator
) -> Iterator[Round]:
    """One round after the other, slices in the order A B B A, B A A B, ..."""
    speed, number = 0.0, 0
    while True:
        starts = generator.normal(0, machine.start, 2)
        slices: tuple[list[Floats], list[Floats]] = ([], [])
        for order in range(2 * SLICES):
            side = ((order + 1) // 2 + number) % 2
            speed = 0.9 * speed + generator.normal(0, machine.drift)
            slices[side].append(_slice(machine, speed + starts[side], generator))
        colds = 1.5 * np.exp(generator.normal(0, machine.cold, 2))
        baseline = _half(np.concatenate(slices[0]), colds[0], IDENTICAL, generator)
        candidate = _half(np.concatenate(slices[1]), colds[1], release, generator)
        yield Round(baseline, candidate)
        number += 1


def _slice(machine: Machine, level: float, generator: np.random.Generator) -> Floats:
    """Milliseconds [requests]."""
    count, rho = machine.requests_a_slice, REQUEST_CORRELATION
    noise = generator.standard_normal(count)
    noise[0] /= np.sqrt(1 - rho**2)
    latencies = np.exp(level + 0.35 * lfilter([np.sqrt(1 - rho**2)], [1, -rho], noise))
    slow = generator.random(count) < 1 / 70
    latencies[slow] *= 1 + generator.pareto(2.5, int(slow.sum()))
    if generator.random() < machine.burst:
        begin, length = generator.integers(0, count), generator.integers(count // 20, count // 2)
        latencies[begin : begin + length] *= generator.uniform(1.3, 3)
    return np.asarray(latencies, np.float64)


def _half(latencies: Floats, cold: float, release: Release, generator: np.random.Generator) -> Half:
    changed = latencies * release.everything
    changed[latencies > np.quantile(latencies, 0.97)] *= release.tail
    count = len(changed)
    cold *= release.cold
    return Half(
        changed,
        0.9 * changed,
        count,
        int(generator.binomial(count, release.wrong)),
        int(generator.binomial(count, release.errors)),
        cold * 0.95,
        cold,
    )


def recorded(path: Path, release: Release, generator: np.random.Generator) -> Iterator[Round]:
    """Rounds of real gates of one version against itself, drawn with replacement.

    Which side was which is as exchangeable as the builds: it is drawn too.
    """
    with np.load(path) as file:
        rounds = [
            [file[f"{side}_{number}"].astype(np.float64) for side in ("a", "b")]
            for number in range(len(file.files) // 2)
        ]
    while True:
        number = int(generator.integers(len(rounds)))
        one = int(generator.integers(2))
        colds = 1.5 * np.exp(generator.normal(0, SHARED.cold, 2))
        yield Round(
            _half(rounds[number][one], colds[0], IDENTICAL, generator),
            _half(rounds[number][1 - one], colds[1], release, generator),
        )


def gate(stream: Iterator[Round], slo: Slo, most_rounds: int) -> tuple[Status, int]:
    """The verdict, and the rounds that it took."""
    looks, rounds = Looks(slo), []
    for number in range(1, most_rounds + 1):
        rounds.append(next(stream))
        if looks.at(rounds, number / most_rounds):
            break
    return looks.status, len(rounds)


def gates(
    streams: Callable[[np.random.Generator], Iterator[Round]],
    slo: Slo,
    *,
    count: int,
    most_rounds: int,
    seed: int = 0,
) -> Tally:
    """``count`` gates, each on a stream of its own."""
    tally = Tally()
    for generator in np.random.default_rng(seed).spawn(count):
        status, rounds = gate(streams(generator), slo, most_rounds)
        tally.counts[status] += 1
        tally.rounds += rounds
    return tally
