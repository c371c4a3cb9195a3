"""Detection of hung workers by the heartbeats of their watchdogs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from modelport.gateway.runtime.watchdog import LoopHeartbeat
from modelport.gateway.server.workers import coordinator, hang_detection
from modelport.gateway.server.workers.coordinator import ConnectedWorker


class WatchedMember:
    """A member, and the end of the socket on which its watchdog tells."""

    def __init__(self) -> None:
        self.end, self.heartbeats = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.heartbeats.setblocking(False)
        self.member = ConnectedWorker(0, SimpleNamespace())  # type: ignore[arg-type]

    def tells(self, blocked_seconds: float = 0.0, computing: bool = False) -> None:
        self.end.send(LoopHeartbeat(blocked_seconds, computing).packed())
        self.member.heard(self.heartbeats)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(hang_detection.time, "monotonic", lambda: now.seconds)
    return now


@pytest.fixture
def worker(clock: SimpleNamespace) -> Iterator[WatchedMember]:
    made = WatchedMember()
    yield made
    made.end.close()
    made.heartbeats.close()


def test_one_that_stops_before_its_first_beat_is_replaced_in_time(
    worker: WatchedMember, clock: SimpleNamespace
) -> None:
    assert not worker.member.joined
    clock.seconds += 1000  # it starts
    worker.member.join()
    assert worker.member.joined
    clock.seconds += hang_detection.HUNG_SECONDS - 0.5
    assert worker.member.hang_reason() == ""
    clock.seconds += 1.0
    assert worker.member.hang_reason() == "it is not running"


def test_one_that_does_not_run_is_replaced_in_time(
    worker: WatchedMember, clock: SimpleNamespace
) -> None:
    worker.tells()
    clock.seconds += hang_detection.HUNG_SECONDS - 0.5
    assert worker.member.hang_reason() == ""
    clock.seconds += 1.0
    assert worker.member.hang_reason() == "it is not running"
    assert hang_detection.HUNG_SECONDS + coordinator.LOOK_SECONDS < 10


def test_a_worker_whose_loop_waits_is_replaced_and_one_that_computes_is_not(
    worker: WatchedMember,
) -> None:
    """Eight requests that each took the loop four seconds had both workers killed."""
    worker.tells(hang_detection.HUNG_SECONDS + 0.1)
    assert worker.member.hang_reason() == "its event loop is blocked"
    worker.tells(hang_detection.HUNG_SECONDS + 0.1, computing=True)
    assert worker.member.hang_reason() == ""
    worker.tells(40.0, computing=True)
    assert worker.member.hang_reason() == ""
    worker.tells(hang_detection.BUSY_SECONDS + 0.1, computing=True)
    assert worker.member.hang_reason() == "its event loop is blocked"


def test_one_that_loads_may_be_silent_for_longer(
    worker: WatchedMember, clock: SimpleNamespace
) -> None:
    worker.tells(computing=True)
    clock.seconds += hang_detection.BUSY_SECONDS - 1
    assert worker.member.hang_reason() == ""


def test_a_coordinator_that_was_itself_blocked_reports_no_hung_worker(
    worker: WatchedMember, clock: SimpleNamespace
) -> None:
    worker.tells()
    clock.seconds += 100
    worker.member.excuse()
    assert worker.member.hang_reason() == ""
