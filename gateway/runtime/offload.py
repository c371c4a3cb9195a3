"""Threads for work that would block the event loop, with cooperative cancellation.

A single call into C holds the interpreter lock until it returns: parsing 64 MB of JSON would stop
every thread for half a second. So large work is a loop over pieces of a few milliseconds, each of
which ends with a ``checkpoint``.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from modelport.gateway.errors import Cancelled, TimedOut
from modelport.gateway.settings import usable_cores
from modelport.gateway.types import NO_DEADLINE, Deadline

T = TypeVar("T")

#: Smaller inputs are decoded on the event loop, in at most a millisecond.
INLINE_BYTES = 32 * 1024
#: Size of a piece, if a byte takes some nanoseconds.
PIECE_BYTES = 64 * 1024
#: More threads would only compete with the event loop for the interpreter lock.
MAX_THREADS = 8
#: Longest wait of the event loop for the lock: a tenth of Python's default.
SWITCH_SECONDS = 0.0005

_threads = ThreadPoolExecutor(min(MAX_THREADS, usable_cores()), thread_name_prefix="offload")


class _ThreadJob:
    """Work in a thread, and whether its caller still waits."""

    __slots__ = ("deadline", "wanted")

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self.wanted = True

    def check(self) -> None:
        if not self.wanted:
            raise Cancelled
        if self.deadline.expired:
            raise TimedOut


_job: contextvars.ContextVar[_ThreadJob | None] = contextvars.ContextVar("job", default=None)


def checkpoint() -> None:
    """End the current work if its caller no longer waits. Large work calls this after every piece.

    Raises:
        Cancelled, TimedOut: In a thread; on the event loop this function does nothing.
    """
    job = _job.get()
    if job is not None:
        job.check()


async def run(work: Callable[[], T], deadline: Deadline = NO_DEADLINE) -> T:
    """Run ``work`` in a thread. If the caller is cancelled, it ends at the next ``checkpoint``.

    Raises:
        TimedOut: The deadline has passed.
    """
    if sys.getswitchinterval() > SWITCH_SECONDS:
        sys.setswitchinterval(SWITCH_SECONDS)
    job = _ThreadJob(deadline)
    context = contextvars.copy_context()
    context.run(_job.set, job)

    def begin() -> T:
        job.check()
        return work()

    try:
        return await asyncio.get_running_loop().run_in_executor(_threads, context.run, begin)
    finally:
        job.wanted = False
