"""A time limit for clients that do not read their responses."""

from __future__ import annotations

import asyncio

from modelport.gateway.runtime.timer_wheel import Timer
from modelport.gateway.server import time_limits


class UnreadTimer:
    """Aborts a connection whose client has read nothing for ``UNREAD_SECONDS``.

    A client that reads at all, however slowly, is waited for.
    """

    __slots__ = ("_loop", "_timer", "_unsent")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: Timer | None = None
        self._unsent = 0

    def start(self, transport: asyncio.Transport) -> None:
        """Watch ``transport``, to which more was written than its socket takes."""
        self.stop()
        self._unsent = transport.get_write_buffer_size()
        self._timer = Timer(self._loop, time_limits.UNREAD_SECONDS, lambda: self._check(transport))

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self, transport: asyncio.Transport) -> None:
        """Close ``transport`` once everything is sent, or the client has stopped reading."""
        transport.close()
        if transport.get_write_buffer_size():
            self.start(transport)

    def _check(self, transport: asyncio.Transport) -> None:
        if transport.get_write_buffer_size() < self._unsent:
            self.start(transport)
        else:
            transport.abort()
