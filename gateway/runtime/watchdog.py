"""Watchdog thread: it logs what blocks the event loop, and reports heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

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
#: Folders of code that others call: Python's own and installed libraries.
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib")})
#: What calls the loop's callbacks; in front of it are the frames that started the loop.
_LOOPS = ("/asyncio/events.py", "/asyncio/base_events.py", "/asyncio/runners.py", "/uvloop/")
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
        self._used_by_threads: dict[int, float] = {}
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
        culprit: dict[str, Any] = {}
        while not self._ended.wait(HEARTBEAT_SECONDS) and not self._loop.is_closed():
            ticked_at, used = self._ticked
            blocked = max(0.0, time.monotonic() - ticked_at - TICK_SECONDS)
            share = (self._used() - used) / max(blocked, TICK_SECONDS)
            self._report(LoopHeartbeat(blocked, self._is_loading or share > COMPUTING_SHARE))
            if blocked > BLOCKED_SECONDS and blocked_at is None:
                blocked_at = ticked_at
                culprit = self._culprit()
                log.warning("the event loop is blocked", seconds=round(blocked, 1), **culprit)
            elif blocked < TICK_SECONDS and blocked_at is not None:
                seconds = round(ticked_at - blocked_at, 1)
                named = {key: culprit[key] for key in ("culprit", "thread") if key in culprit}
                log.warning("the event loop continues", blocked_seconds=seconds, **named)
                blocked_at = None
            if blocked < TICK_SECONDS:
                self._used_by_threads = _processor_times()

    def _culprit(self) -> dict[str, Any]:
        """The code that blocks the loop, its thread, and the innermost frames of its stack.

        It is a callback of the loop; without one, the thread that has computed most since the loop
        was last seen to run, as native code of any thread may keep the interpreter lock.
        """
        stacks = sys._current_frames()
        thread_id, frames = self._thread_id, _frames(stacks.get(self._thread_id))
        last = max((i for i, each in enumerate(frames) if _is_loop(each)), default=-1)
        if not frames[last + 1 :]:
            used = _processor_times()
            before = self._used_by_threads
            others = {
                each: used[each] - before.get(each, 0.0)
                for each in used.keys() - {self._thread_id, threading.get_ident()}
            }
            busiest = max(others, key=others.__getitem__, default=0)
            if others.get(busiest, 0.0) > COMPUTING_SHARE * BLOCKED_SECONDS:
                thread_id, frames = busiest, _frames(stacks.get(busiest))
        else:
            frames = frames[last + 1 :]
        name = next((each.name for each in threading.enumerate() if each.ident == thread_id), "")
        return {
            "culprit": _named(frames),
            "thread": "the event loop's" if thread_id == self._thread_id else name,
            "blocked_in": [
                f"{each.filename}:{each.lineno} {each.name}" for each in frames[-FRAMES:]
            ],
        }


def _processor_times() -> dict[int, float]:
    """Processor time of each thread that runs Python, by its identity."""
    found = {}
    for thread in threading.enumerate():
        with contextlib.suppress(OSError, OverflowError):  # it has ended
            if thread.ident is not None and thread.is_alive():
                clock = time.pthread_getcpuclockid(thread.ident)
                found[thread.ident] = time.clock_gettime(clock)
    return found


def _frames(frame: FrameType | None) -> list[traceback.FrameSummary]:
    return list(traceback.extract_stack(frame)) if frame is not None else []


def _is_loop(frame: traceback.FrameSummary) -> bool:
    return any(place in frame.filename for place in _LOOPS)


def _named(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost function that is no library's, and the library's function that it called."""
    own = [each for each in frames if not each.filename.startswith(_LIBRARIES)]
    if not frames:
        return "native code"
    named = [own[-1]] if own else []
    if not own or frames[-1] is not own[-1]:
        named.append(frames[-1])
    return ", in ".join(
        f"{each.name} ({_short(each.filename)}:{each.lineno})" for each in reversed(named)
    )


def _short(path: str) -> str:
    """The path below the folder of its library, or the last three parts."""
    for folder in sorted(_LIBRARIES, key=len, reverse=True):
        if path.startswith(folder):
            return path.removeprefix(folder)
    return "/".join(path.split("/")[-3:])
