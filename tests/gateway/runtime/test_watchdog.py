"""The watchdog of an event loop: what it tells of one that stands still, and why it does."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import pytest
import structlog
import uvloop

from modelport.gateway.runtime import watchdog
from modelport.gateway.runtime.watchdog import LoopHeartbeat, Watchdog

Log = MutableMapping[str, Any]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(watchdog, "BLOCKED_SECONDS", 0.1)
    # On a busy machine a thread that computes gets a small part of a processor.
    monkeypatch.setattr(watchdog, "COMPUTING_SHARE", 0.02)


class Heard:
    """A recorder of heartbeats; the thread that blocks the loop waits for them."""

    def __init__(self) -> None:
        self.heartbeats: list[LoopHeartbeat] = []
        self._come = threading.Condition()

    def __call__(self, heartbeat: LoopHeartbeat) -> None:
        with self._come:
            self.heartbeats.append(heartbeat)
            self._come.notify_all()

    def wait_for(self, blocked_seconds: float) -> LoopHeartbeat:
        """Blocks the caller's thread, without computing."""
        with self._come:
            assert self._come.wait_for(
                lambda: self.heartbeats and self.heartbeats[-1].blocked_seconds > blocked_seconds,
                30,
            )
            return self.heartbeats[-1]


def compute_until(heard: Heard, blocked_seconds: float) -> LoopHeartbeat:
    deadline = time.monotonic() + 30
    while not heard.heartbeats or heard.heartbeats[-1].blocked_seconds <= blocked_seconds:
        sum(range(1000))
        assert time.monotonic() < deadline
    return heard.heartbeats[-1]


async def test_a_waiting_loop_is_distinguished_from_a_computing_one() -> None:
    heard = Heard()
    watching = Watchdog(heard)
    assert heard.wait_for(0.3).computing is False
    await asyncio.sleep(0.05)
    assert compute_until(heard, 0.3).computing is True
    watching.close()


async def test_while_a_model_loads_a_loop_that_waits_is_excused() -> None:
    heard = Heard()
    watching = Watchdog(heard, lambda: True)
    assert heard.wait_for(0.3).computing is True
    watching.close()


async def test_a_blocked_loop_is_logged_once_with_its_cause_and_its_end() -> None:
    heard = Heard()
    with structlog.testing.capture_logs() as logs:
        watching = Watchdog(heard)
        heard.wait_for(0.3)
        while not any(entry["event"] == "the event loop continues" for entry in logs):
            await asyncio.sleep(0.01)
        watching.close()
    blocked = [entry for entry in logs if entry["event"] == "the event loop is blocked"]
    assert len(blocked) == 1
    assert any("wait_for" in frame for frame in blocked[0]["blocked_in"])
    assert any("test_a_blocked_loop" in frame for frame in blocked[0]["blocked_in"])
    assert blocked[0]["thread"] == "the event loop's"
    named = r"wait \(threading\.py:\d+\), in wait_for \(gateway/runtime/test_watchdog\.py:\d+\)"
    assert re.fullmatch(named, blocked[0]["culprit"]), blocked


def logged(run: Callable[[Heard], Awaitable[object]], logs: Sequence[Log]) -> None:
    """Let a loop of its own run ``run``, and wait until ``logs`` says that it continues."""

    async def main() -> None:
        heard = Heard()
        watching = Watchdog(heard)
        await asyncio.sleep(0.1)
        await run(heard)
        while not any(entry["event"] == "the event loop continues" for entry in logs):
            await asyncio.sleep(0.01)
        watching.close()

    uvloop.run(main())


def test_a_thread_that_keeps_the_interpreter_lock_is_the_culprit() -> None:
    """The loop waits for the lock in native code, and runs no callback: its stack is innocent."""
    found = threading.Event()

    def hold_the_lock() -> None:
        while not found.is_set():
            re.match("(a+)+$", "a" * 22 + "b")

    async def beside_the_loop(heard: Heard) -> None:
        threading.Thread(target=hold_the_lock, name="guilty").start()
        deadline = time.monotonic() + 60
        while not any(entry.get("thread") == "guilty" for entry in logs):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        found.set()

    with structlog.testing.capture_logs() as logs:
        logged(beside_the_loop, logs)
    entry = next(entry for entry in logs if entry.get("thread") == "guilty")
    assert "in hold_the_lock (gateway/runtime/test_watchdog.py:" in entry["culprit"]


def test_a_watchdog_that_nobody_closes_ends_with_its_loop() -> None:
    async def start() -> None:
        Watchdog()

    before = set(threading.enumerate())
    asyncio.run(start())
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()
