"""A thread for work that nobody waits for."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from modelport.gateway.runtime.thread_scheduling import lower_priority


class BackgroundThread:
    """A thread of lower priority that does one piece of work after the other.

    The first piece of work starts the thread. Only the event loop calls ``do``. No work may raise.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Queue ``work``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(work)

    def _serve(self) -> None:
        lower_priority()
        while (work := self._work.get()) is not None:
            work()
            del work  # do not keep it alive while waiting

    def close(self) -> None:
        """Drop queued work and wait for the piece in progress."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._work.get_nowait()
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
