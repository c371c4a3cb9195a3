"""Tests of overload detection in simulated time."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelport.gateway.inference.admission.controller import (
    PROBE_SECONDS,
    AdmissionDecision,
    OverloadController,
)
from tests.thorough import thorough

LEAST = 256


@dataclass
class SimulatedRequest:
    came: float
    #: None: nobody waits for it before the next comes.
    client: ClosedLoopClient | None = None


@dataclass(eq=False)
class ClosedLoopClient:
    """One that has a single request at a time. ``pauses``: from each refusal to the next try."""

    pauses: Callable[[int], float]
    round_trip: float = 0.0001
    refusals: int = 0


@dataclass
class SimulatedModel:
    """``instances`` that run up to ``batch`` waiting requests at a time, and a controller."""

    controller: OverloadController
    instances: int = 1
    batch: int = 1
    run_seconds: float = 0.01
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    held: list[SimulatedRequest] = field(default_factory=list)
    in_flight: int = 0
    running: int = 0
    #: When each came, how long it took, and whether a client waited for it.
    answered: list[tuple[float, float]] = field(default_factory=list)
    refused: list[tuple[float, float]] = field(default_factory=list)
    refused_clients: list[float] = field(default_factory=list)
    _events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=itertools.count)
    _probe_ends: float = 0.0

    def at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def run(self, seconds: float) -> None:
        """Until then nobody comes any more, and nothing is left to do."""
        self.ends = seconds
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
            while self.running < self.instances and self.waiting:
                taken = [self.waiting.popleft() for _ in range(min(self.batch, len(self.waiting)))]
                self.running += 1
                self.at(now + self.run_seconds, functools.partial(self._end, taken))

    def come(self, request: SimulatedRequest, now: float) -> None:
        controller = self.controller
        if now >= self.ends:
            return
        request.came = now
        if controller.arrived(now, self.in_flight):
            while self.waiting and self.in_flight > controller.limit:
                self.in_flight -= 1
                self._refuse(self.waiting.popleft(), now)
        if self.in_flight < controller.limit:
            self._admit(request)
            return
        verdict = controller.judge(now, self.in_flight)
        if controller.failed_probe():
            self._end_probe(now, now)
        if verdict is AdmissionDecision.HOLD:
            if not self.held:
                self._probe_ends = now + PROBE_SECONDS
                self.at(self._probe_ends, functools.partial(self._end_probe, self._probe_ends))
            self.held.append(request)
            controller.held += 1
        else:
            self._refuse(request, now)

    def _end_probe(self, planned: float, now: float) -> None:
        if not self.held or planned not in (now, self._probe_ends) or now > self._probe_ends:
            return
        ended, held = self.controller.end_probe(now, self.in_flight), self.held
        self.held, self.controller.held, self._probe_ends = [], 0, 0.0
        for each in held:
            if ended:
                self._admit(each)
            else:
                self._refuse(each, now)

    def _admit(self, request: SimulatedRequest) -> None:
        self.in_flight += 1
        self.waiting.append(request)

    def _refuse(self, request: SimulatedRequest, now: float) -> None:
        self.refused.append((request.came, now - request.came))
        if client := request.client:
            self.refused_clients.append(now)
            client.refusals += 1
            self.at(now + client.pauses(client.refusals), functools.partial(self.come, request))

    def _end(self, taken: list[SimulatedRequest], now: float) -> None:
        self.running -= 1
        self.in_flight -= len(taken)
        for request in taken:
            self.controller.answered(self.run_seconds)
            self.answered.append((request.came, now - request.came))
            if client := request.client:
                client.refusals = 0
                self.at(now + client.round_trip, functools.partial(self.come, request))


def play(
    model: SimulatedModel,
    arrivals: Iterator[float],
    clients: int | list[ClosedLoopClient],
    seconds: float,
) -> None:
    """``arrivals``: times, of an open loop; ``clients``: that come again with every answer."""
    if isinstance(clients, int):
        clients = [ClosedLoopClient(lambda _: 0.0005) for _ in range(clients)]
    for number, client in enumerate(clients):
        model.at(number * 0.00015, functools.partial(model.come, SimulatedRequest(0.0, client)))

    def next_one(_: float) -> None:
        due = next(arrivals, math.inf)
        if due < seconds:
            model.at(due, lambda now: model.come(SimulatedRequest(now), now))
            model.at(due, next_one)

    next_one(0.0)
    model.run(seconds)


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


def capacity(model: SimulatedModel) -> float:
    return model.instances * model.batch / model.run_seconds


def good(model: SimulatedModel, seconds: float) -> bool:
    """Whether the model was busy and p99 latency at most three times that without load."""
    busy = len(model.answered) >= 0.9 * capacity(model) * seconds
    return busy and quantile(model.answered, 0.99) <= 3 * model.run_seconds


@pytest.mark.parametrize("comes", [thorough(even), poisson])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ten_times_too_much_is_refused_and_what_is_accepted_is_quick(
    shape: dict[str, float], comes: Callable[[float], Iterator[float]]
) -> None:
    seconds = 30.0
    instances = int(shape.get("instances", 1))
    model = SimulatedModel(OverloadController(instances, LEAST), **shape)  # type: ignore[arg-type]
    play(model, comes(10 * capacity(model)), 0, seconds)
    assert good(model, seconds), (len(model.answered), quantile(model.answered, 0.99))
    assert quantile(model.refused, 0.5) == 0.0
    assert quantile(model.refused, 0.99) <= 0.05


def test_the_check_sees_a_queue_that_is_not_cut() -> None:
    model = SimulatedModel(OverloadController(1, 10**9))
    play(model, even(10 * capacity(model)), 0, 3.0)
    assert not model.refused
    assert not good(model, 3.0)


@pytest.mark.parametrize("clients", [1, 16, 256, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_clients_that_wait_for_their_answers_are_never_refused(
    shape: dict[str, float], clients: int
) -> None:
    instances = int(shape.get("instances", 1))
    model = SimulatedModel(OverloadController(instances, LEAST), **shape)  # type: ignore[arg-type]
    play(model, iter(()), clients, 10.0)
    assert not model.refused
    assert len(model.answered) > 10 * min(clients, capacity(model)) * 0.9


@pytest.mark.parametrize("comes", [even, poisson])
def test_what_a_model_can_do_is_never_refused(
    comes: Callable[[float], Iterator[float]],
) -> None:
    model = SimulatedModel(OverloadController(1, LEAST))
    play(model, comes(0.95 * capacity(model)), 0, 120.0)
    assert not model.refused


@pytest.mark.parametrize("comes", [even, poisson])
def test_after_an_overload_everything_is_answered_again_within_a_second(
    comes: Callable[[float], Iterator[float]],
) -> None:
    model = SimulatedModel(OverloadController(1, LEAST))
    rate = capacity(model)
    arrivals = heapq.merge(comes(0.8 * rate), even(9.2 * rate, 5.0, 10.0))
    play(model, arrivals, 0, 20.0)
    assert any(come < 10.0 for come, _ in model.refused)
    assert not any(come > 11.0 for come, _ in model.refused)
    assert model.controller.limit == math.inf


def test_a_burst_that_is_over_is_answered_whole() -> None:
    model = SimulatedModel(OverloadController(1, LEAST))
    play(model, even(20_000, 0.0, 0.1), 0, 60.0)
    assert len(model.answered) == 2000


# -- after a pulse --------------------------------------------------------------------------------

#: From a refusal to the next try: how clients behave.
PAUSES: dict[str, Callable[[int], float]] = {
    "at once": lambda _: 0.0002,
    "over a network": lambda _: 0.005,
    "after a little": lambda _: 0.05,
    "after a silence": lambda refusals: 3.0 if refusals == 1 else 0.0002,
    "backing off": lambda refusals: min(2.0, 0.05 * 2.0 ** min(refusals, 10)),
}
NORMAL_SECONDS = 5.0


def after_pulse(
    model: SimulatedModel, clients: list[ClosedLoopClient], times: float, seconds: float
) -> list[float]:
    """Times of refusals later than 5 s after a pulse of ``times`` the capacity."""
    start, end = 2.0, 2.0 + seconds
    play(model, even(times * capacity(model), start, end), clients, end + NORMAL_SECONDS + 2.0)
    return [when for when in model.refused_clients if when > end + NORMAL_SECONDS]


class DecidedByArrivals(OverloadController):
    """The controller as it was: refused requests that try again keep the overload up."""

    __slots__ = ()

    def judge(self, now: float, before: int) -> AdmissionDecision:
        return AdmissionDecision.ADMIT if before < self.limit else AdmissionDecision.REFUSE

    def _turn(self, now: float, elapsed: float, in_flight: int) -> bool:
        over = self._arrived <= 1.25 * self._answered + 4
        begins = super()._turn(now, elapsed, in_flight)
        if over and self.limit != math.inf:
            self._end(now, in_flight)
        return begins


@pytest.mark.parametrize("pauses", PAUSES)
def test_the_pulse_of_the_report_leaves_nothing_behind(pauses: str) -> None:
    model = SimulatedModel(OverloadController(1, LEAST), run_seconds=1 / 191)
    clients = [ClosedLoopClient(PAUSES[pauses]) for _ in range(16)]
    assert after_pulse(model, clients, 10.0, 6.0) == []
    assert model.controller.limit == math.inf
    assert len(model.refused) > 1000
    late = [took for come, took in model.answered if come > 2 + 6 + NORMAL_SECONDS]
    assert len(late) >= 0.9 * 2.0 * capacity(model)


@pytest.mark.thorough
def test_the_check_sees_a_controller_that_counts_refused_retries_as_arrivals() -> None:
    model = SimulatedModel(DecidedByArrivals(1, LEAST), run_seconds=1 / 191)
    clients = [ClosedLoopClient(PAUSES["at once"]) for _ in range(16)]
    assert len(after_pulse(model, clients, 10.0, 6.0)) > 1000


@settings(max_examples=10, derandomize=True)
@given(
    run_seconds=st.sampled_from([0.002, 0.005, 0.02, 0.05]),
    instances=st.integers(1, 4),
    batch=st.sampled_from([1, 8]),
    behaviours=st.lists(st.sampled_from(sorted(PAUSES)), min_size=1, max_size=40),
    times=st.floats(1.5, 20.0),
    seconds=st.floats(0.1, 3.0),
)
def test_after_any_pulse_all_is_normal_within_five_seconds_whatever_clients_do(
    run_seconds: float,
    instances: int,
    batch: int,
    behaviours: list[str],
    times: float,
    seconds: float,
) -> None:
    model = SimulatedModel(OverloadController(instances, LEAST), instances, batch, run_seconds)
    clients = [ClosedLoopClient(PAUSES[each]) for each in behaviours]
    assert after_pulse(model, clients, times, seconds) == []


@pytest.mark.parametrize("clients", [64, 300])
def test_any_number_of_clients_that_try_again_at_once_is_let_in(clients: int) -> None:
    model = SimulatedModel(OverloadController(2, LEAST), 2, 8, 0.01)
    assert (
        after_pulse(
            model, [ClosedLoopClient(PAUSES["over a network"]) for _ in range(clients)], 10, 1.0
        )
        == []
    )


def test_a_continuing_overload_is_not_mistaken_for_its_end() -> None:
    model = SimulatedModel(OverloadController(1, LEAST))
    play(model, poisson(10 * capacity(model)), 16, 15.0)
    longest = max(took for _, took in model.answered[500:])
    assert longest < 0.2, "as long as a queue of the begin"
