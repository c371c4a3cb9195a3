"""Work that is cut into slices, so that it delays nobody: a generator that yields after each slice.

What is small runs at once. What is large runs in a thread, and between two slices the event loop
gets the interpreter, and the work ends if nobody waits for it any more. A slice takes a millisecond
or so where it holds the interpreter's lock, and as long as it likes where it does not.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.errors import Cancelled, TimedOut
from gateway.settings import usable_cores
from gateway.types import NO_DEADLINE, Deadline

T = TypeVar("T")
Slices = Generator[None, None, T]

#: What is handled in one slice, where a byte takes some nanoseconds.
SLICE_BYTES = 64 * 1024
#: Bodies up to this are decoded at once, in a millisecond or less.
INLINE_BYTES = 32 * 1024
#: More threads would only queue for the interpreter's lock, and the event loop behind them.
MAX_THREADS = 4
#: How long the event loop waits for that lock, at most: a tenth of Python's own default.
SWITCH_SECONDS = 0.0005

_threads = ThreadPoolExecutor(min(MAX_THREADS, usable_cores()), thread_name_prefix="slices")


def at_once(work: Slices[T]) -> T:
    """The result of ``work``, here and now."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


async def soon(work: Slices[T], deadline: Deadline = NO_DEADLINE) -> T:
    """The result of ``work``: its first slice is done here, and what is left, if any, aside.

    Raises:
        TimedOut: the deadline has passed.
    """
    try:
        next(work)
    except StopIteration as end:
        result: T = end.value
        return result
    return await aside(work, deadline)


async def aside(work: Slices[T], deadline: Deadline = NO_DEADLINE) -> T:
    """The result of ``work``, done in a thread; what cancels the caller ends the work.

    Raises:
        TimedOut: the deadline has passed.
    """
    if sys.getswitchinterval() > SWITCH_SECONDS:
        sys.setswitchinterval(SWITCH_SECONDS)
    wanted = [True]
    context = contextvars.copy_context()

    def run() -> T:
        return context.run(_run, work, deadline, wanted)

    try:
        return await asyncio.get_running_loop().run_in_executor(_threads, run)
    finally:
        wanted.clear()


def _run(work: Slices[T], deadline: Deadline, wanted: list[bool]) -> T:
    try:
        while wanted:
            if deadline.expired:
                raise TimedOut
            next(work)
            time.sleep(0)  # gives the lock away
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise Cancelled  # nobody waits for it
