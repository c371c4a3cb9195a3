"""Timers for limits that are rarely reached.

A timer of the event loop costs as much as everything else that a small request's deadline needs.
A timer that is far off therefore waits in a wheel, and reaches the loop shortly before it is due;
by then it is usually cancelled.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from modelport.gateway.errors import TimedOut
from modelport.gateway.types import Deadline

T = TypeVar("T")

#: Width of a slot. Timers that are due within two slots go to the loop at once.
TICK_SECONDS = 0.25
#: Later timers are filed again after this time, so that the number of slots is bounded.
HORIZON_SECONDS = 60.0


class Timer:
    """Runs ``callback`` on the loop after ``seconds``, unless it is cancelled first."""

    __slots__ = ("_callback", "_handle", "_slot", "_when")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], object]
    ) -> None:
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None
        self._slot: set[Timer] | None = None
        self._when = 0.0
        if seconds < 2 * TICK_SECONDS:
            self._handle = loop.call_later(max(0.0, seconds), callback)
            return
        now = time.monotonic()
        self._when = now + seconds
        self._slot = _wheel(loop).add(self, min(self._when, now + HORIZON_SECONDS))

    def cancel(self) -> None:
        if self._slot is not None:
            self._slot.discard(self)
        if self._handle is not None:
            self._handle.cancel()
        self._callback = _nothing  # breaks the reference cycle with the owner

    def hand_over(self, wheel: _Wheel) -> None:
        """Move to the loop, or to a later slot if it is still far off."""
        now = time.monotonic()
        if self._when - now >= 2 * TICK_SECONDS:
            self._slot = wheel.add(self, min(self._when, now + HORIZON_SECONDS))
            return
        self._slot = None
        self._handle = wheel.loop.call_later(max(0.0, self._when - now), self._callback)


def _nothing() -> None:
    pass


class _Wheel:
    """The distant timers of one loop, by the slot in which they are due."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._slots: dict[int, set[Timer]] = {}
        self._turning = False

    def add(self, timer: Timer, when: float) -> set[Timer]:
        slot = self._slots.setdefault(int(when / TICK_SECONDS), set())
        slot.add(timer)
        if not self._turning:
            self._turning = True
            self.loop.call_later(TICK_SECONDS, self._turn)
        return slot

    def _turn(self) -> None:
        near = int(time.monotonic() / TICK_SECONDS) + 1
        for number in [number for number in self._slots if number <= near]:
            for timer in self._slots.pop(number):
                timer.hand_over(self)
        self._turning = bool(self._slots)
        if self._turning:
            self.loop.call_later(TICK_SECONDS, self._turn)


class _ThreadWheel(threading.local):
    """The wheel of the loop that runs in this thread."""

    wheel: _Wheel | None = None


_current = _ThreadWheel()


def _wheel(loop: asyncio.AbstractEventLoop) -> _Wheel:
    wheel = _current.wheel
    if wheel is None or wheel.loop is not loop:
        wheel = _current.wheel = _Wheel(loop)
    return wheel


class TimeLimit:
    """A cheap ``asyncio.timeout``, as a synchronous context manager.

    After ``seconds`` (None: never) the block is cancelled and raises ``TimeoutError``. ``expired``
    tells whether this limit, and not an outer one, ended it.
    """

    __slots__ = ("_cancelling", "_seconds", "_task", "_timer", "expired")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._timer: Timer | None = None
        self._cancelling = 0
        self.expired = False

    def __enter__(self) -> TimeLimit:
        if self._seconds is not None:
            loop = asyncio.get_running_loop()
            task = asyncio.current_task(loop)
            assert task is not None
            self._task = task
            self._cancelling = task.cancelling()
            self._timer = Timer(loop, self._seconds, self.end)
        return self

    def end(self) -> None:
        """Expire now."""
        if not self.expired:
            self.expired = True
            self._task.cancel()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.expired:
            # The task may have been cancelled from outside as well: then that takes precedence.
            only_this = self._task.uncancel() <= self._cancelling
            if only_this and type(error) is asyncio.CancelledError:
                raise TimeoutError from error


async def within(answer: Awaitable[T], deadline: Deadline) -> T:
    """Await ``answer``; raise ``TimedOut`` and cancel it if the deadline comes first."""
    remaining = deadline.remaining()
    if remaining is None:
        return await answer
    limit = TimeLimit(remaining)
    try:
        with limit:
            return await answer
    except TimeoutError:
        if not limit.expired:
            raise  # raised by the answer itself
        raise TimedOut from None


class MovableTimer:
    """Calls ``expired`` at a time that ``after`` and ``stop`` move.

    Moving it costs nothing: there is one timer of the loop, which checks the time when it is due.
    """

    __slots__ = ("_at", "_due", "_expired", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop, self._expired = loop, expired
        self._at = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # of the timer

    def after(self, seconds: float) -> None:
        """Expire in ``seconds`` from now, instead of before."""
        self._at = at = self._loop.time() + seconds
        if at < self._due:
            if self._timer is not None:
                self._timer.cancel()
            self._due, self._timer = at, self._loop.call_at(at, self._check)

    def stop(self) -> None:
        """Do not expire until the next ``after``."""
        self._at = math.inf

    def close(self) -> None:
        """Never expire, and cancel the loop's timer."""
        self._at = math.inf
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer, self._due = None, math.inf
        if self._loop.time() >= self._at:
            self._expired()
        elif self._at != math.inf:
            self._due, self._timer = self._at, self._loop.call_at(self._at, self._check)
