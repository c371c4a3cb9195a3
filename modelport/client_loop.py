"""The event loop of a synchronous client."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from modelport.gateway.errors import InvalidArgument

T = TypeVar("T")


class Closable(Protocol):
    """A client on the loop."""

    async def close(self) -> None:
        """Close the connections."""


class LoopThread:
    """An event loop on a thread of its own, so that callers need none and may have one."""

    def __init__(self, client: Closable) -> None:
        self._loop = loop = asyncio.new_event_loop()
        #: Starts with the first call.
        self._thread = threading.Thread(
            target=_run_loop, args=(loop,), name="modelport-client", daemon=True
        )
        #: Runs once: for a client that is forgotten, and at the end of the process, too.
        self._finish = weakref.finalize(self, _finish, loop, self._thread, client)
        self._starting = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work``, and return its result."""
        with self._starting:
            if not self._finish.alive:
                work.close()
                raise InvalidArgument("the client is closed")
            if not self._thread.is_alive():
                self._thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Close the client and end the thread."""
        self._finish()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _finish(loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: Closable) -> None:
    if not thread.is_alive():
        loop.close()
        return
    asyncio.run_coroutine_threadsafe(_end(client), loop)
    if thread is not threading.current_thread():  # where the garbage collector may run
        thread.join()


async def _end(client: Closable) -> None:
    await client.close()
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.stop)  # after the callbacks of connections that were closed
