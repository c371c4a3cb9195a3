"""Threads for the blocking part of loads, with a time limit.

Python cannot end a thread. A load that exceeds its limit, or is running when the gateway stops, is
abandoned: neither a caller nor the exit of the process waits for it, and the version it loads in
the end is unloaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from modelport.gateway.errors import Internal, Unavailable
from modelport.gateway.models.model import ServedVersion

T = TypeVar("T")

#: Concurrent loads; those that compute here are further limited to one for each core.
MAX_LOADS = 64
#: A load releases its core after this time, because it may never end, and waits no longer for one,
#: however many such loads there are.
CORE_SECONDS = 5.0


class LoadThreads:
    """Runs loads in threads. Belongs to the event loop."""

    def __init__(self, cores: int) -> None:
        self._loads = asyncio.Semaphore(MAX_LOADS)
        self._cores = asyncio.Semaphore(cores)
        self._stopped = False
        #: Done when the gateway stops; created by the first load, on the event loop.
        self._stop: asyncio.Future[None] | None = None

    @asynccontextmanager
    async def core(self) -> AsyncGenerator[None, None]:
        """Hold a core for a load that computes in this process."""
        held: list[asyncio.Semaphore] = []
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._cores.acquire(), CORE_SECONDS)
            held.append(self._cores)

        def give_back() -> None:
            if held:
                held.pop().release()

        handle = asyncio.get_running_loop().call_later(CORE_SECONDS, give_back)
        try:
            yield
        finally:
            handle.cancel()
            give_back()

    async def run(self, limit_seconds: float | None, load: Callable[..., T], *args: Any) -> T:
        """Run ``load`` in a thread of its own and return its result.

        Raises:
            Internal: the load exceeded ``limit_seconds``.
            Unavailable: the gateway is stopping.
        """
        if self._stop is None:
            self._stop = asyncio.get_running_loop().create_future()
        async with self._loads:
            if not self._stopped:
                loading = _start(load, *args)
                waiting: asyncio.Future[T] = asyncio.wrap_future(loading)
                try:
                    await asyncio.wait(
                        (waiting, self._stop),
                        timeout=limit_seconds,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                finally:
                    if not waiting.done():
                        loading.add_done_callback(_discard)
                        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
                if waiting.done():
                    return waiting.result()
        if self._stopped:
            raise Unavailable("the server is shutting down")
        raise Internal(
            f"the load did not finish within {limit_seconds:g} s, the limit of "
            "--model-load-timeout-secs"
        )

    def stop(self) -> None:
        """Stop waiting for loads."""
        self._stopped = True
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(None)


def _start(load: Callable[..., T], *args: Any) -> Future[T]:
    """Run ``load`` in a daemon thread, so that the exit of the process does not wait for it."""
    loading: Future[T] = Future()

    def work() -> None:
        try:
            loading.set_result(load(*args))
        except BaseException as error:  # crosses to the loop, whatever it is
            loading.set_exception(error)

    threading.Thread(target=work, name="load", daemon=True).start()
    return loading


def _discard(loading: Future[Any]) -> None:
    if loading.exception() is None and isinstance(loading.result(), ServedVersion):
        loading.result().backend.unload()
