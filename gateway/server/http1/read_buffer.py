"""Flow control of a connection's input: slices for the parser, and back-pressure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

#: Size of a slice; the event loop serves other connections between two slices.
SLICE_BYTES = 32 * 1024
#: Reading pauses if more of a body waits for the application.
HIGH_WATER_BYTES = 256 * 1024


class ReadBuffer:
    """Passes received bytes to ``take`` in slices, and pauses reading while some are left."""

    __slots__ = ("_loop", "_paused", "_take", "_transport", "_unread", "held")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        take: Callable[[bytes | memoryview], None],
    ) -> None:
        self._loop, self._transport, self._take = loop, transport, take
        self._unread = memoryview(b"")
        self._paused = False
        #: Whether slices wait for ``resume``.
        self.held = False

    def receive(self, data: bytes | memoryview) -> None:
        self._unread = memoryview(data)
        self._pause()
        self._next()

    def hold(self) -> None:
        """Pass nothing on until ``resume``."""
        self.held = True
        self._pause()

    def resume(self) -> None:
        """Pass on the bytes that wait, then read more."""
        self.held = False
        if self._unread:
            self._loop.call_soon(self._next)
        elif self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def drop(self) -> memoryview:
        """Remove and return the bytes that wait."""
        unread, self._unread = self._unread, memoryview(b"")
        return unread

    def _next(self) -> None:
        part, self._unread = self._unread[:SLICE_BYTES], self._unread[SLICE_BYTES:]
        if part:
            self._take(part)
        if not self.held:
            self.resume()

    def _pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()
