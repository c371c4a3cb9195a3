"""Supervised background tasks: log an exception and restart the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger("modelport.upstream")

#: The delay before work that failed is restarted.
RESTART_SECONDS = 1.0


class BackgroundTasks:
    """The background tasks of one owner. Used on the event loop."""

    def __init__(self, name: str) -> None:
        """``name``: the model's, for the log."""
        self._name = name
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._supervise(work, *args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _supervise(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        while True:
            try:
                return await work(*args)
            except (asyncio.CancelledError, Exception):
                if is_cancelled():
                    raise
                log.exception("a background task of a route failed", model=self._name)
                await asyncio.sleep(RESTART_SECONDS)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


def is_cancelled() -> bool:
    """Whether this task itself is cancelled, not something that it awaits."""
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())
