"""Work off the event loop: in a thread, and ended where nobody waits for it any more.

Python's lock goes from one thread to another between two of its instructions, never within one. So
large work is written as a loop over small pieces, none of which holds the lock for more than a few
milliseconds, with a ``checkpoint`` in it: parsing 64 MB of JSON by one call would stop every thread
for half a second.
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

#: Decoding up to this takes a millisecond or less: it is done at once.
INLINE_BYTES = 32 * 1024
#: What one piece of large work goes through, where a byte takes some nanoseconds.
PIECE_BYTES = 64 * 1024
#: More threads would only queue for the interpreter's lock, and the event loop behind them.
MAX_THREADS = 8
#: How long the event loop waits for that lock, at most: a tenth of Python's own default.
SWITCH_SECONDS = 0.0005

_threads = ThreadPoolExecutor(min(MAX_THREADS, usable_cores()), thread_name_prefix="offload")


class _Job:
    """Work in a thread."""

    __slots__ = ("deadline", "wanted")

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self.wanted = True

    def check(self) -> None:
        if not self.wanted:
            raise Cancelled
        if self.deadline.expired:
            raise TimedOut


_job: contextvars.ContextVar[_Job | None] = contextvars.ContextVar("job", default=None)


def checkpoint() -> None:
    """End the work at hand if nobody waits for it; large work calls this after every piece.

    Raises:
        Cancelled, TimedOut: in a thread; what is done at once goes on.
    """
    job = _job.get()
    if job is not None:
        job.check()


async def run(work: Callable[[], T], deadline: Deadline = NO_DEADLINE) -> T:
    """The result of ``work``, done in a thread. Cancelling the caller ends it at a ``checkpoint``.

    Raises:
        TimedOut: the deadline has passed.
    """
    if sys.getswitchinterval() > SWITCH_SECONDS:
        sys.setswitchinterval(SWITCH_SECONDS)
    job = _Job(deadline)
    context = contextvars.copy_context()
    context.run(_job.set, job)

    def begin() -> T:
        job.check()
        return work()

    try:
        return await asyncio.get_running_loop().run_in_executor(_threads, context.run, begin)
    finally:
        job.wanted = False
