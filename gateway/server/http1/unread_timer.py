"""Limits for clients that do not read their responses: of memory, and of time."""

from __future__ import annotations

import asyncio

from modelport.gateway.runtime.request_memory import ConnectionMemory, Lease, UnreadResponse
from modelport.gateway.runtime.timer_wheel import Timer
from modelport.gateway.server import time_limits
from modelport.gateway.server.listening_socket import untaken_bytes


class UnreadTimer:
    """Counts what a connection's socket does not take, and aborts it after ``UNREAD_SECONDS``.

    A client that reads at all, however slowly, is waited for, as long as memory lasts.
    """

    __slots__ = ("_loop", "_moved_at", "_response", "_timer", "_transport", "_untaken")

    def __init__(self, loop: asyncio.AbstractEventLoop, memory: ConnectionMemory) -> None:
        self._loop = loop
        self._response = UnreadResponse(memory, self._abort)
        self._transport: asyncio.Transport | None = None
        self._timer: Timer | None = None
        #: What the client had not taken at the last look, and when it last took anything.
        self._untaken = 0
        self._moved_at = 0.0

    def count(self, size: int, request: Lease | None) -> None:
        """Count a response that is about to be written, in place of its ``request``; 0: it is sent.

        Raises:
            MemoryExhausted: The budget does not allow it.
        """
        if size:
            self._response.hold(size, request)
        else:
            self._response.release()

    def pause(self, transport: asyncio.Transport) -> None:
        """Count and watch ``transport``, to which more was written than its socket takes."""
        if not self._response.size:
            self._response.hold(transport.get_write_buffer_size(), exceed=True)
        self.start(transport, self._loop.time())

    def start(self, transport: asyncio.Transport, since: float) -> None:
        """Watch ``transport``, whose client is not known to have taken anything ``since`` then."""
        self.stop()
        self._transport = transport
        self._untaken, self._moved_at = untaken_bytes(transport), since
        self._watch()

    def _watch(self) -> None:
        seconds = min(time_limits.CHECK_SECONDS, time_limits.UNREAD_SECONDS)
        self._timer = Timer(self._loop, seconds, self._check)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self, transport: asyncio.Transport, since: float | None = None) -> None:
        """Close ``transport`` once everything is sent, or the client has stopped reading."""
        transport.close()
        if transport.get_write_buffer_size():
            self.start(transport, self._loop.time() if since is None else since)

    def _check(self) -> None:
        assert self._transport is not None
        untaken, now = untaken_bytes(self._transport), self._loop.time()
        self._response.look(untaken)
        if untaken < self._untaken:
            self._moved_at = now
        self._untaken = untaken
        if now - self._moved_at >= time_limits.UNREAD_SECONDS:
            self._abort()
        else:
            self._watch()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
