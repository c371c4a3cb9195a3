"""Time limits for every request, of which hardly any is ever reached.

A timer of the event loop costs as much as all else that is done for a small request's deadline.
One that is far off is only noted here, by the moment at which the loop has to know of it, and by
then it is mostly cancelled.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType

#: How often those that come near are handed to the loop; nearer ones are its own at once.
TICK_SECONDS = 0.25
#: What ends later is looked at again by then: else every request might leave a slot of its own.
HORIZON_SECONDS = 60.0


class Timer:
    """``callback`` runs on the loop, ``seconds`` from now, unless it is cancelled before."""

    __slots__ = ("_callback", "_handle", "_noted", "_when")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], object]
    ) -> None:
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None
        self._noted: set[Timer] | None = None
        self._when = 0.0
        if seconds < 2 * TICK_SECONDS:
            self._handle = loop.call_later(max(0.0, seconds), callback)
            return
        now = time.monotonic()
        self._when = now + seconds
        self._noted = _wheel(loop).note(self, min(self._when, now + HORIZON_SECONDS))

    def cancel(self) -> None:
        if self._noted is not None:
            self._noted.discard(self)
        if self._handle is not None:
            self._handle.cancel()
        self._callback = _nothing  # it refers to whoever refers to this

    def come_near(self, wheel: _Wheel) -> None:
        """The loop's own from now on, unless it is still far off."""
        now = time.monotonic()
        if self._when - now >= 2 * TICK_SECONDS:
            self._noted = wheel.note(self, min(self._when, now + HORIZON_SECONDS))
            return
        self._noted = None
        self._handle = wheel.loop.call_later(max(0.0, self._when - now), self._callback)


def _nothing() -> None:
    pass


class _Wheel:
    """The far-off timers of one loop, by the tick in which they end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._slots: dict[int, set[Timer]] = {}
        self._turns = False

    def note(self, timer: Timer, when: float) -> set[Timer]:
        slot = self._slots.setdefault(int(when / TICK_SECONDS), set())
        slot.add(timer)
        if not self._turns:
            self._turns = True
            self.loop.call_later(TICK_SECONDS, self._turn)
        return slot

    def _turn(self) -> None:
        near = int(time.monotonic() / TICK_SECONDS) + 1
        for number in [number for number in self._slots if number <= near]:
            for timer in self._slots.pop(number):
                timer.come_near(self)
        self._turns = bool(self._slots)
        if self._turns:
            self.loop.call_later(TICK_SECONDS, self._turn)


class _Here(threading.local):
    """A loop runs in one thread, and a thread has one at a time."""

    wheel: _Wheel | None = None


_here = _Here()


def _wheel(loop: asyncio.AbstractEventLoop) -> _Wheel:
    wheel = _here.wheel
    if wheel is None or wheel.loop is not loop:
        wheel = _here.wheel = _Wheel(loop)
    return wheel


class TimeLimit:
    """As ``asyncio.timeout``: what is awaited in the block is cancelled after ``seconds``.

    The block then raises ``TimeoutError``. ``None``: there is no limit. ``expired``: whether it was
    this one, and not another, that ended the block.
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
        """End the block now, as if the time had passed."""
        if not self.expired:
            self.expired = True
            self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.expired:
            # Somebody else may have cancelled the task too: then that is what it is.
            only_this = self._task.uncancel() <= self._cancelling
            if only_this and kind is asyncio.CancelledError:
                raise TimeoutError from error
