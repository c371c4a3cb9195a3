"""The bytes of a connection, handed on in slices, and held back when asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

#: Handed on at once; the loop serves others before the next.
SLICE_BYTES = 32 * 1024


class Intake:
    """Hands what ``receive`` is given to ``take``; reading pauses while some of it waits."""

    __slots__ = ("_loop", "_paused", "_take", "_transport", "_unread", "held")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, take: Callable[[bytes | memoryview], None]
    ) -> None:
        self._loop, self._take = loop, take
        self._transport: asyncio.Transport | None = None
        self._unread = memoryview(b"")
        self._paused = False
        #: Nothing is handed on until ``resume``.
        self.held = False

    def open(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def receive(self, data: bytes) -> None:
        if len(data) <= SLICE_BYTES:
            self._take(data)
        else:
            self._unread = memoryview(data)
            self._pause()
            self._next()

    def hold(self) -> None:
        """Hand nothing on until ``resume``."""
        self.held = True
        self._pause()

    def resume(self) -> None:
        """Hand on what waits, in turns with others, and read more."""
        self.held = False
        if self._unread:
            self._loop.call_soon(self._next)
        elif self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def drop(self) -> None:
        """Forget what waits."""
        self._unread = memoryview(b"")

    def _next(self) -> None:
        part, self._unread = self._unread[:SLICE_BYTES], self._unread[SLICE_BYTES:]
        if part:
            self._take(part)
        if not self.held:
            self.resume()

    def _pause(self) -> None:
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()
