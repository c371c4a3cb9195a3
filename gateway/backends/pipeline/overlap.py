"""The order of results of work that overlaps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class _End(NamedTuple):
    """The end of the items of a queue, and the error that caused it."""

    error: Exception | None


async def overlapped(
    sources: AsyncGenerator[T, None], branch: Callable[[T], AsyncGenerator[R, None]], most: int
) -> AsyncGenerator[R, None]:
    """Yield the results of ``branch`` for each source, as if one branch followed the other.

    Branches begin as soon as their sources arrive. While ``most`` branches wait behind the first,
    no further source is taken.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def branches() -> AsyncGenerator[asyncio.Queue[R | _End], None]:
        async with contextlib.aclosing(sources):
            async for source in sources:
                yield _queued(branch(source), 1, tasks)

    try:
        async for results in _items(_queued(branches(), most, tasks)):
            async for result in _items(results):
                yield result
    finally:
        ended = list(tasks)
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)


def _queued(
    items: AsyncGenerator[T, None], size: int, tasks: set[asyncio.Task[None]]
) -> asyncio.Queue[T | _End]:
    """Start a task that generates ``items`` into a queue of ``size``."""
    queue: asyncio.Queue[T | _End] = asyncio.Queue(size)
    task = asyncio.create_task(_fill(queue, items))
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return queue


async def _fill(queue: asyncio.Queue[T | _End], items: AsyncGenerator[T, None]) -> None:
    error = None
    try:
        async with contextlib.aclosing(items):
            async for item in items:
                await queue.put(item)
    except Exception as raised:
        error = raised
    await queue.put(_End(error))


async def _items(queue: asyncio.Queue[T | _End]) -> AsyncGenerator[T, None]:
    while not isinstance(item := await queue.get(), _End):
        yield item
    if item.error is not None:
        raise item.error
