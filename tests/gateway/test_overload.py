"""What is an overload and what only looks like one, in simulated time."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from gateway.overload import Detector

LEAST = 256


@dataclass
class Model:
    """``instances`` that run up to ``batch`` waiting requests at a time, and a detector."""

    detector: Detector
    instances: int = 1
    batch: int = 1
    run_seconds: float = 0.01
    #: When each request came; ``None``s stand for the end of a run.
    waiting: deque[float] = field(default_factory=deque)
    in_flight: int = 0
    running: int = 0
    #: Of those answered: when they came, how long it took.
    answered: list[tuple[float, float]] = field(default_factory=list)
    #: Of those refused: the same.
    refused: list[tuple[float, float]] = field(default_factory=list)

    def come(self, now: float) -> bool:
        """Whether the request is let in."""
        if self.detector.arrived(now, self.in_flight):
            while self.waiting and self.in_flight > self.detector.limit:
                come = self.waiting.popleft()
                self.refused.append((come, now - come))
                self.in_flight -= 1
        if self.in_flight >= self.detector.limit:
            self.refused.append((now, 0.0))
            return False
        self.in_flight += 1
        self.waiting.append(now)
        return True

    def begin(self) -> list[float] | None:
        if self.running == self.instances or not self.waiting:
            return None
        self.running += 1
        return [self.waiting.popleft() for _ in range(min(self.batch, len(self.waiting)))]

    def end(self, taken: list[float], now: float) -> None:
        self.running -= 1
        self.in_flight -= len(taken)
        for come in taken:
            self.detector.answered(self.run_seconds)
            self.answered.append((come, now - come))


def play(model: Model, arrivals: Iterator[float], clients: int, seconds: float) -> None:
    """``arrivals``: times, of an open loop; ``clients``: that come again with every answer."""
    order = itertools.count()
    events: list[tuple[float, int, list[float] | None]] = []
    first = ((n * 0.00015, next(order), None) for n in range(clients))
    for event in first:
        heapq.heappush(events, event)
    due = next(arrivals, math.inf)
    if due < math.inf:
        heapq.heappush(events, (due, next(order), None))
    opened = due < math.inf
    while events:
        now, _, ended = heapq.heappop(events)
        if ended is not None:
            model.end(ended, now)
            if clients and now < seconds:
                for _ in ended:
                    heapq.heappush(events, (now + 0.0001, next(order), None))
        elif now < seconds:
            model.come(now)
            if opened and (due := next(arrivals, math.inf)) < math.inf:
                heapq.heappush(events, (due, next(order), None))
        while (taken := model.begin()) is not None:
            heapq.heappush(events, (now + model.run_seconds, next(order), taken))


def even(rate: float, start: float = 0.0, end: float = math.inf) -> Iterator[float]:
    times = (start + n / rate for n in itertools.count())
    return itertools.takewhile(lambda at: at < end, times)


def poisson(rate: float, seed: int = 7) -> Iterator[float]:
    generator = random.Random(seed)
    return itertools.accumulate(generator.expovariate(rate) for _ in itertools.count())


def quantile(rows: list[tuple[float, float]], share: float) -> float:
    ordered = sorted(took for _, took in rows)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


SHAPES = [
    {"run_seconds": 0.01},
    {"run_seconds": 0.005},
    {"run_seconds": 0.002},
    {"run_seconds": 0.01, "instances": 4},
    {"run_seconds": 0.02, "batch": 32},
    {"run_seconds": 0.1, "instances": 2, "batch": 8},
]


def capacity(model: Model) -> float:
    return model.instances * model.batch / model.run_seconds


def good(model: Model, seconds: float) -> bool:
    """What must hold, with what one instance takes for one run as the latency without load."""
    busy = len(model.answered) >= 0.9 * capacity(model) * seconds
    return busy and quantile(model.answered, 0.99) <= 3 * model.run_seconds


@pytest.mark.parametrize("comes", [even, poisson])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ten_times_too_much_is_refused_and_what_is_accepted_is_quick(
    shape: dict[str, float], comes: Callable[[float], Iterator[float]]
) -> None:
    seconds = 30.0
    instances = int(shape.get("instances", 1))
    model = Model(Detector(instances, LEAST), **shape)  # type: ignore[arg-type]
    play(model, comes(10 * capacity(model)), 0, seconds)
    assert good(model, seconds), (len(model.answered), quantile(model.answered, 0.99))
    assert quantile(model.refused, 0.98) == 0.0


def test_the_check_sees_a_queue_that_is_not_cut() -> None:
    model = Model(Detector(1, 10**9))
    play(model, even(10 * capacity(model)), 0, 3.0)
    assert not model.refused
    assert not good(model, 3.0)


@pytest.mark.parametrize("clients", [1, 16, 256, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_clients_that_wait_for_their_answers_are_never_refused(
    shape: dict[str, float], clients: int
) -> None:
    instances = int(shape.get("instances", 1))
    model = Model(Detector(instances, LEAST), **shape)  # type: ignore[arg-type]
    play(model, iter(()), clients, 10.0)
    assert not model.refused
    assert len(model.answered) > 10 * min(clients, capacity(model)) * 0.9


@pytest.mark.parametrize("comes", [even, poisson])
def test_what_a_model_can_do_is_never_refused(
    comes: Callable[[float], Iterator[float]],
) -> None:
    model = Model(Detector(1, LEAST))
    play(model, comes(0.95 * capacity(model)), 0, 120.0)
    assert not model.refused


@pytest.mark.parametrize("comes", [even, poisson])
def test_after_an_overload_everything_is_answered_again_within_a_second(
    comes: Callable[[float], Iterator[float]],
) -> None:
    model = Model(Detector(1, LEAST))
    rate = capacity(model)
    arrivals = heapq.merge(comes(0.8 * rate), even(9.2 * rate, 5.0, 10.0))
    play(model, arrivals, 0, 20.0)
    assert any(come < 10.0 for come, _ in model.refused)
    assert not any(come > 11.0 for come, _ in model.refused)
    assert model.detector.limit == math.inf


def test_a_burst_that_is_over_is_answered_whole() -> None:
    model = Model(Detector(1, LEAST))
    play(model, even(20_000, 0.0, 0.1), 0, 60.0)
    assert len(model.answered) == 2000
