"""Time limits: what ``asyncio.timeout`` promises, at a tenth of its price."""

from __future__ import annotations

import asyncio
import gc
import heapq
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from modelport.gateway.runtime import timer_wheel
from modelport.gateway.runtime.timer_wheel import TimeLimit, Timer


@pytest.fixture
def fast_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the tick, so that timers due in 40 ms or more use the wheel."""
    monkeypatch.setattr(timer_wheel, "TICK_SECONDS", 0.02)


class WheelClock:
    """The loop's and the module's clock, which moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.loop: Any = self
        self._calls: list[tuple[float, int, asyncio.Handle]] = []

    def monotonic(self) -> float:
        return self.now

    def call_later(
        self, seconds: float, callback: Callable[..., object], *args: object
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self.loop)
        heapq.heappush(self._calls, (self.now + seconds, id(handle), handle))
        return handle

    def get_debug(self) -> bool:
        return False

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._calls and self._calls[0][0] <= end:
            self.now, _, handle = heapq.heappop(self._calls)
            if not handle.cancelled():
                handle._run()
        self.now = end


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WheelClock:
    clock = WheelClock()
    monkeypatch.setattr(timer_wheel, "time", clock)
    return clock


async def test_a_near_limit_ends_the_block() -> None:
    limit = TimeLimit(0.01)
    with pytest.raises(TimeoutError), limit:
        await asyncio.Event().wait()
    assert limit.expired
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_a_limit_of_nothing_ends_the_block_at_once() -> None:
    with pytest.raises(TimeoutError), TimeLimit(0.0):
        await asyncio.Event().wait()


async def test_a_far_limit_ends_the_block(fast_tick: None) -> None:
    for seconds in (0.05, 0.09):
        with pytest.raises(TimeoutError), TimeLimit(seconds):
            await asyncio.Event().wait()


def test_a_timer_runs_neither_early_nor_late(clock: WheelClock) -> None:
    horizon = timer_wheel.HORIZON_SECONDS
    for seconds in (0.0, 0.4, 0.6, 3.3, horizon, 2.5 * horizon):
        started, ran = clock.now, list[float]()
        Timer(clock.loop, seconds, lambda ran=ran: ran.append(clock.now))  # type: ignore[misc]
        clock.advance(seconds + 10)
        assert ran == [pytest.approx(started + seconds)]


async def test_a_time_limit_of_none_never_expires() -> None:
    with TimeLimit(None) as limit:
        await asyncio.sleep(0)
    assert not limit.expired


async def test_a_block_that_ends_in_time_is_left_alone(fast_tick: None) -> None:
    for seconds in (0.01, 0.06):
        with TimeLimit(seconds):
            await asyncio.sleep(0)
    ended = asyncio.Event()
    Timer(asyncio.get_running_loop(), 0.2, ended.set)
    await ended.wait()  # later than either limit


async def test_a_cancellation_from_outside_is_not_a_timeout() -> None:
    entered = asyncio.Event()

    async def work() -> None:
        with TimeLimit(30.0):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_at_the_moment_of_the_limit_stays_one() -> None:
    entered = asyncio.Event()

    async def work(limit: TimeLimit) -> None:
        with limit:
            entered.set()
            await asyncio.Event().wait()

    limit = TimeLimit(30.0)
    task = asyncio.create_task(work(limit))
    await entered.wait()
    limit.end()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_outer_of_two_limits_is_not_taken_for_the_inner_one() -> None:
    outer, inner = TimeLimit(0.01), TimeLimit(30.0)
    with pytest.raises(TimeoutError), outer, inner:
        await asyncio.Event().wait()
    assert outer.expired
    assert not inner.expired


async def test_timers_that_are_cancelled_leave_nothing_behind() -> None:
    class Owner:
        def __init__(self) -> None:
            self.timer = Timer(asyncio.get_running_loop(), 60.0, self.on_time)

        def on_time(self) -> None: ...

    gc.disable()
    try:
        owners = [Owner() for _ in range(100)]
        watched: list[Callable[[], object]] = [weakref.ref(owner) for owner in owners]
        for owner in owners:
            owner.timer.cancel()
        del owner, owners
        assert not any(each() for each in watched)
    finally:
        gc.enable()


async def test_every_timer_runs_once_and_cancelled_ones_never(fast_tick: None) -> None:
    loop, ran = asyncio.get_running_loop(), list[int]()
    last = asyncio.Event()
    made = [
        Timer(loop, 0.03 + number / 1000, lambda number=number: ran.append(number))  # type: ignore[misc]
        for number in range(100)
    ]
    for number in range(0, 100, 3):
        made[number].cancel()
    Timer(loop, 0.2, last.set)
    await last.wait()
    assert sorted(ran) == [number for number in range(100) if number % 3]


async def test_timers_of_any_length_leave_nothing_behind_when_they_are_cancelled() -> None:
    loop = asyncio.get_running_loop()
    for number in range(3000):
        Timer(loop, 10.0 + 100.0 * number, asyncio.Event().set).cancel()
    slots = timer_wheel._wheel(loop)._slots
    assert len(slots) <= timer_wheel.HORIZON_SECONDS / timer_wheel.TICK_SECONDS + 2
    assert not any(slots.values())


def test_a_timer_beyond_the_horizon_is_cancelled_as_any_other(clock: WheelClock) -> None:
    far = 3 * timer_wheel.HORIZON_SECONDS
    cancelled = Timer(clock.loop, far, lambda: pytest.fail("it was cancelled"))
    Timer(clock.loop, far / 2, cancelled.cancel)
    clock.advance(2 * far)
