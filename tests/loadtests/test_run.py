"""Runs of the real Locust: what it asks, what it measures, what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from modelport.loadtests.load import payloads, run
from modelport.loadtests.load.payloads import Payloads
from modelport.loadtests.load.run import NotMeasured, measure, measure_mix
from modelport.loadtests.load.samples import LoadProfile, Outcome
from modelport.loadtests.load.summary import latencies, summarise
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from tests.loadtests.oip_server import Answer, double, serving
from tests.models import repository
from tests.server import Gateway


@pytest.mark.thorough
def test_every_dialect_asks_the_gateway_and_gets_right_answers(tmp_path: Path) -> None:
    x = np.float32([[1, 2, 3, 4], [5, 6, 7, 8]])
    made = Payloads(({"x": x},), {"x": "FP32"}, ({"y": 2 * x},))
    payloads.write(made, tmp_path / "requests.json")
    gateway = Gateway(repository(tmp_path / "repository"))
    try:
        targets = [
            (LoadTestTarget(p, gateway.grpc if p.is_grpc else gateway.http, "x2"), 1)
            for p in LoadTestProtocol
        ]
        load = LoadProfile(users=len(targets), rate=90, duration_seconds=1, warmup_seconds=0.2)
        runs = measure_mix(targets, load, [tmp_path / "requests.json"])
    finally:
        gateway.close()
    assert [one.target.protocol for one in runs] == list(LoadTestProtocol)
    for one in runs:
        summary = summarise(one)
        assert (summary.ok, summary.bad) == (summary.requests, 0), (one.target, summary.errors)
        assert summary.requests == pytest.approx(10, abs=1)
        assert summary.latency.p50 > 0


@pytest.mark.thorough
def test_an_open_loop_sends_when_due_and_shows_what_a_stall_costs() -> None:
    """One answer takes 0.6 s on a server that gives one at a time: all that were due meanwhile
    waited, which a client that waits with them would not show."""
    turn = threading.Lock()

    def answer(number: int, x: list[float]) -> tuple[int, list[float]]:
        with turn:
            if number == 60:
                time.sleep(0.6)
            elif number in (50, 51):
                return 200, [0.0] * 4  # fast, and wrong
            elif number == 52:
                return 503, []
            return double(number, x)

    with serving(answer) as server:
        target = LoadTestTarget(LoadTestProtocol.OIP_HTTP, server.address, "double")
        load = LoadProfile(users=64, rate=60, duration_seconds=2, warmup_seconds=0)
        got = measure(target, load)
    assert len(got.samples) == 120
    np.testing.assert_allclose(np.diff(got.samples["intended"]), 1 / 60, atol=1e-6)
    outcomes = np.bincount(got.samples["outcome"], minlength=5)
    assert outcomes[Outcome.WRONG] == 2
    assert outcomes[Outcome.REFUSED] == 1
    assert sum(n for said, n in got.errors.items() if said.startswith("output 'y' is off by")) == 2
    assert any("503" in message for message in got.errors)
    # Those due in the 0.6 s waited 0.3 s on average; half of them at least that long.
    assert np.count_nonzero(latencies(got.samples) > 0.3) >= 15
    assert np.all(got.samples["first_byte"] >= got.samples["sent"])
    assert np.all(got.samples["done"] >= got.samples["first_byte"])
    assert got.began_at
    assert got.client_cpu_seconds > 0


@pytest.mark.thorough
def test_a_closed_loop_keeps_its_users_asking_in_two_processes() -> None:
    present, most, lock = 0, 0, threading.Lock()

    def answer(number: int, x: list[float]) -> tuple[int, list[float]]:
        nonlocal present, most
        with lock:
            present += 1
            most = max(most, present)
        time.sleep(0.02)
        with lock:
            present -= 1
        return double(number, x)

    with serving(answer) as server:
        target = LoadTestTarget(LoadTestProtocol.OIP_HTTP, server.address, "double")
        load = LoadProfile(users=3, duration_seconds=1.5, warmup_seconds=0.5)
        got = measure(target, load, processes=2)
    summary = summarise(got)
    assert most == 3
    assert summary.bad == 0
    assert summary.latency.p50 >= 20  # more on a busy machine, and then fewer requests
    assert 0 < summary.requests_per_second <= 150
    assert got.samples["intended"].min() >= 0.5


@pytest.mark.thorough
def test_an_unreachable_target_is_reported_with_the_reason() -> None:
    free = LoadTestTarget(LoadTestProtocol.OIP_HTTP, "127.0.0.1:1", "double")
    with pytest.raises(NotMeasured, match="is the server running there"):
        measure(free, LoadProfile(duration_seconds=1))
    with pytest.raises(ValueError, match="shape 'saw'"):
        measure(free, LoadProfile(shape="saw"))


def test_a_killed_run_leaves_no_locust() -> None:
    """SIGKILL to who measures: nothing can be tidied up, and Locust ends all the same."""
    with serving() as server:
        program = (
            "from modelport.loadtests.load.run import *\n"
            "from modelport.loadtests.load.target import *\n"
            f"measure(LoadTestTarget(LoadTestProtocol.OIP_HTTP, {server.address!r}, 'double'),"
            " LoadProfile(duration_seconds=60))"
        )
        parent = subprocess.Popen([sys.executable, "-c", program])
        try:
            give_up = time.monotonic() + 60
            while len(server.asked) < 40:  # the first requests are 32
                assert time.monotonic() < give_up
                assert parent.poll() is None
                threading.Event().wait(0.02)
            (child,) = psutil.Process(parent.pid).children()
        finally:
            os.kill(parent.pid, signal.SIGKILL)
            parent.wait()
        child.wait(run.STOP_SECONDS + 10)


@pytest.mark.thorough
def test_a_lone_user_asks_two_targets_in_turn_there_and_back() -> None:
    asked: list[str] = []

    def told(name: str) -> Answer:
        def answer(number: int, x: list[float]) -> tuple[int, list[float]]:
            asked.append(name)
            return double(number, x)

        return answer

    with serving(told("a")) as one, serving(told("b")) as other:
        targets = [
            (LoadTestTarget(LoadTestProtocol.OIP_HTTP, s.address, "double"), 1)
            for s in (one, other)
        ]
        runs = measure_mix(targets, LoadProfile(duration_seconds=0.3, warmup_seconds=0))
    learnt = asked.index("b") * 2  # both answer every payload once, before the load
    turns = "".join(asked[learnt:])
    assert len(turns) > 8
    assert ("abba" * len(turns)).startswith(turns)
    counts = [len(run.samples) for run in runs]
    assert abs(counts[0] - counts[1]) <= 1
    assert sum(counts) == len(turns)


@pytest.mark.thorough
def test_every_target_has_a_user_whatever_its_weight() -> None:
    with serving(double) as one, serving(double) as other:
        targets = [
            (LoadTestTarget(LoadTestProtocol.OIP_HTTP, server.address, "double"), weight)
            for server, weight in ((one, 100), (other, 1))
        ]
        load = LoadProfile(users=2, rate=100, duration_seconds=0.5, warmup_seconds=0)
        runs = measure_mix([(targets[0][0], 1), (targets[1][0], 1)], load)
        assert [len(run.samples) for run in runs] == [25, 25]
        runs = measure_mix(targets, LoadProfile(users=2, duration_seconds=0.3, warmup_seconds=0))
        assert all(len(run.samples) for run in runs)
        with pytest.raises(ValueError, match="number of users: 1 for 2 targets"):
            measure_mix(targets, LoadProfile(users=1, rate=10.0))


@pytest.mark.thorough
def test_an_overload_ends_and_what_was_never_sent_has_timed_out() -> None:
    def slow(number: int, x: list[float]) -> tuple[int, list[float]]:
        time.sleep(0.1)
        return double(number, x)

    with serving(slow) as server:
        target = LoadTestTarget(LoadTestProtocol.OIP_HTTP, server.address, "double")
        load = LoadProfile(
            users=1, rate=100, duration_seconds=1, warmup_seconds=0, timeout_seconds=0.5
        )
        found = summarise(measure(target, load))
    assert found.requests == 100
    assert found.timed_out > 75
    assert next(iter(found.errors)).startswith("not sent within 0.5 s")


class _EndsWhenLookedAt:
    """A process that runs while it is looked at for the first time, and has ended afterwards."""

    def __init__(self) -> None:
        self.looks = 0

    def poll(self) -> int | None:
        self.looks += 1
        return None if self.looks == 1 else 0

    def wait(self, timeout: float) -> int:
        return 0


def test_a_client_that_ends_between_two_looks_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = SimpleNamespace(
        load=SimpleNamespace(warmup_seconds=0.0, duration_seconds=1.0, timeout_seconds=1.0),
        targets=(),
    )
    assert run._wait([part], [_EndsWhenLookedAt()], None) == ""  # type: ignore[list-item]
