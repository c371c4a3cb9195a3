"""Watchdog thread: it logs what blocks the event loop, and reports heartbeats."""

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

#: Intervals of the loop's ticks and of the thread's checks.
TICK_SECONDS = 0.25
HEARTBEAT_SECONDS = 0.5
#: A loop that is blocked for longer is logged.
BLOCKED_SECONDS = 1.0
#: A blocked thread that uses less of a processor than this is waiting, not computing.
COMPUTING_SHARE = 0.2
#: Innermost stack frames that are logged.
FRAMES = 12
_HEARTBEAT = struct.Struct(">d?")


class LoopHeartbeat(NamedTuple):
    """State of an event loop: how long it has been blocked, and whether its thread is computing.

    A model that loads counts as computing: libraries may hold the interpreter lock.
    """

    blocked_seconds: float
    computing: bool

    def packed(self) -> bytes:
        return _HEARTBEAT.pack(*self)

    @classmethod
    def unpacked(cls, content: bytes) -> LoopHeartbeat:
        return cls(*_HEARTBEAT.unpack(content))


class Watchdog:
    """Watchdog of the running loop.

    Args:
        report: Called from the watchdog's thread with every heartbeat.
        loading: Whether models are loading; called from the loop.
    """

    def __init__(
        self,
        report: Callable[[LoopHeartbeat], None] = lambda _: None,
        loading: Callable[[], bool] = lambda: False,
    ) -> None:
        self._report, self._loading = report, loading
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread_id)
        self._is_loading = False
        self._ended = threading.Event()
        self._tick()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def _tick(self) -> None:
        """Run on the loop, to show that it is not blocked."""
        self._is_loading = self._loading()
        self._ticked = time.monotonic(), self._used()
        if not self._ended.is_set():
            self._loop.call_later(TICK_SECONDS, self._tick)

    def _used(self) -> float:
        """Processor time of the loop's thread."""
        return time.clock_gettime(self._clock)

    def _watch(self) -> None:
        blocked_at: float | None = None
        while not self._ended.wait(HEARTBEAT_SECONDS):
            ticked_at, used = self._ticked
            blocked = max(0.0, time.monotonic() - ticked_at - TICK_SECONDS)
            share = (self._used() - used) / max(blocked, TICK_SECONDS)
            self._report(LoopHeartbeat(blocked, self._is_loading or share > COMPUTING_SHARE))
            if blocked > BLOCKED_SECONDS and blocked_at is None:
                blocked_at = ticked_at
                log.warning(
                    "the event loop is blocked", seconds=round(blocked, 1), blocked_in=self._stack()
                )
            elif blocked < TICK_SECONDS and blocked_at is not None:
                seconds = round(ticked_at - blocked_at, 1)
                log.warning("the event loop continues", blocked_seconds=seconds)
                blocked_at = None

    def _stack(self) -> list[str]:
        frame = sys._current_frames().get(self._thread_id)
        frames = traceback.extract_stack(frame)[-FRAMES:] if frame is not None else ()
        return [f"{each.filename}:{each.lineno} {each.name}" for each in frames]
