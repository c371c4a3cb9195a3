"""A thread that watches the event loop: it names what blocks it, and tells others how it does."""

from __future__ import annotations

import asyncio
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

import structlog

log = structlog.get_logger("modelport.watchdog")

#: How often the loop moves its hand, and how often the thread looks.
TICK_SECONDS = 0.25
BEAT_SECONDS = 0.5
#: A loop that stands still for so long is worth a line in the log.
BLOCKED_SECONDS = 1.0
#: A loop's thread that took less of a processor than this while it stood still waits for something.
COMPUTING_SHARE = 0.2
#: Of the stack, its innermost frames.
FRAMES = 12
_beat = struct.Struct(">d?")


class Beat(NamedTuple):
    """How an event loop does: since when it stands still, and whether that is for work.

    ``computing``: its thread computes, or a model loads, whose libraries hold the interpreter.
    """

    blocked_seconds: float
    computing: bool

    def packed(self) -> bytes:
        return _beat.pack(*self)

    @classmethod
    def unpacked(cls, content: bytes) -> Beat:
        return cls(*_beat.unpack(content))


class Watchdog:
    """Watches the loop it is made on.

    Args:
        tell: called from the watchdog's thread with every beat.
        loading: whether models load; called from the loop.
    """

    def __init__(
        self,
        tell: Callable[[Beat], None] = lambda _: None,
        loading: Callable[[], bool] = lambda: False,
    ) -> None:
        self._tell, self._loading = tell, loading
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._clock = (
            time.pthread_getcpuclockid(self._thread_id)
            if hasattr(time, "pthread_getcpuclockid")
            else None
        )
        self._is_loading = False
        self._ended = threading.Event()
        self._tick()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def _tick(self) -> None:
        """Runs on the loop: it is alive."""
        self._is_loading = self._loading()
        self._ticked = time.monotonic(), self._used()
        if not self._ended.is_set():
            self._loop.call_later(TICK_SECONDS, self._tick)

    def _used(self) -> float:
        """The processor time of the loop's thread; where it cannot be told, all time is used."""
        return time.monotonic() if self._clock is None else time.clock_gettime(self._clock)

    def _watch(self) -> None:
        blocked_at: float | None = None
        while not self._ended.wait(BEAT_SECONDS):
            ticked_at, used = self._ticked
            blocked = max(0.0, time.monotonic() - ticked_at - TICK_SECONDS)
            share = (self._used() - used) / max(blocked, TICK_SECONDS)
            self._tell(Beat(blocked, self._is_loading or share > COMPUTING_SHARE))
            if blocked > BLOCKED_SECONDS and blocked_at is None:
                blocked_at = ticked_at
                log.warning(
                    "the event loop is blocked", seconds=round(blocked, 1), blocked_in=self._stack()
                )
            elif blocked < TICK_SECONDS and blocked_at is not None:
                seconds = round(ticked_at - blocked_at, 1)
                log.warning("the event loop goes on", blocked_seconds=seconds)
                blocked_at = None

    def _stack(self) -> list[str]:
        frame = sys._current_frames().get(self._thread_id)
        frames = traceback.extract_stack(frame)[-FRAMES:] if frame is not None else ()
        return [f"{each.filename}:{each.lineno} {each.name}" for each in frames]
