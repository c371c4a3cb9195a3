"""A worker's end of its socket: frames that come in, and the threads that wait for them.

No thread reads all the time: the thread that needs a frame reads it (``wait``), and passes on what
is for others. So a request costs no switch between threads. While a model's ``execute`` runs on an
event loop, the loop reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .frames import (
    CANCEL,
    CREDIT,
    DONTWAIT,
    FINAL,
    REPLY,
    Frame,
    FrameError,
    FrameReader,
    pack,
    send,
)  # fmt: skip
from .regions import Buffer, SentRegions

#: Threads look again after this time, whatever happens.
_LOOK_SECONDS = 1.0
_MAX_CANCELLED = 1024
#: Unread responses of one stream.
WINDOW = 64
#: NaN and lone surrogates, which a model may have, are no JSON.
_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
#: Any size: the gateway is trusted.
_ANY = 2**63


class CallReplies:
    """Replies to a frame that the worker has sent."""

    __slots__ = ("arrived", "finished", "replies")

    def __init__(self) -> None:
        self.replies: deque[Frame] = deque()
        self.finished = False
        self.arrived: Callable[[], object] | None = None


class Channel:
    """The worker's end of the socket. Threads may use it together."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._reader = FrameReader(stream, _ANY, writable=True)
        self._reading = threading.Lock()
        self._sending = threading.Lock()
        self._regions = SentRegions()
        self._waiting: set[threading.Event] = set()
        self._calls: dict[int, CallReplies] = {}
        self._last = 0
        #: Frames for the main thread, in order.
        self.inbox: deque[Frame] = deque()
        #: Numbers of requests that nobody waits for, until they end.
        self.cancelled: set[int] = set()
        #: Responses that a request may send before the gateway has read any.
        self.credits: dict[int, int] = {}
        #: Frames to send as soon as nobody else sends.
        self._later: deque[tuple[int, int, int, Any]] = deque()
        self.loop: asyncio.AbstractEventLoop | None = None
        #: Called on ``loop`` when the inbox has a frame.
        self.arrived: Callable[[], None] = lambda: None
        #: Called on ``loop`` with the number of a request that nobody waits for any more.
        self.abandoned: Callable[[int], None] = lambda number: None

    # -- sending ----------------------------------------------------------------------------------

    def send(
        self, kind: int, number: int, value: int = 0, meta: Any = None,
        buffers: Sequence[Buffer] = (),
    ) -> None:  # fmt: skip
        """Send a frame; ``meta`` is a JSON value, a hashable one if it is a tuple."""
        if type(meta) is tuple:
            content = _encode_again(meta)
        else:
            content = b"" if meta is None else encode(meta)
        with self._sending:
            rest = send(self._stream, pack(kind, number, value, content, buffers, self._regions))
            while rest is not None:
                rest = send(self._stream, rest)
        if self._later:
            self._send_late()

    def send_late(self, kind: int, number: int, value: int, meta: Any) -> None:
        """Send a small frame from a finalizer, which may interrupt this thread while it sends."""
        self._later.append((kind, number, value, meta))
        self._send_late()

    def _send_late(self) -> None:
        while self._later and self._sending.acquire(blocking=False):
            try:
                with contextlib.suppress(IndexError):
                    kind, number, value, meta = self._later.popleft()
                    send(self._stream, pack(kind, number, value, encode(meta)))
            finally:
                self._sending.release()

    def call(self, kind: int, meta: Any, buffers: Sequence[Buffer] = ()) -> tuple[int, CallReplies]:
        """Send a frame that the gateway replies to."""
        call = CallReplies()
        with self._sending:
            self._last = number = self._last + 1
            self._calls[number] = call
        self.send(kind, number, 0, meta, buffers)
        return number, call

    def end_call(self, number: int) -> None:
        """Drop what is still replied to a call."""
        self._calls.pop(number, None)

    # -- receiving --------------------------------------------------------------------------------

    def wait(self, done: Callable[[], bool]) -> None:
        """Read until ``done``, or wait while another thread reads."""
        while not done():
            if self._reading.acquire(blocking=False):
                try:
                    while not done():
                        self._read()
                finally:
                    self._reading.release()
                    self._wake()
                return
            event = threading.Event()
            self._waiting.add(event)
            if not done() and self._reading.locked():
                event.wait(_LOOK_SECONDS)
            self._waiting.discard(event)

    def poll(self) -> None:
        """Read what is there, unless another thread reads."""
        if self._reading.acquire(blocking=False):
            try:
                self._read(DONTWAIT)
            except BlockingIOError:
                pass
            finally:
                self._reading.release()

    def _read(self, flags: int = 0) -> None:
        try:
            frames = self._reader.read(flags)
        except BlockingIOError:
            raise
        except (EOFError, OSError, FrameError):
            os._exit(0)  # the gateway has closed the socket, or is gone
        for frame in frames:
            self._dispatch(frame)
        if self._waiting:
            self._wake()

    def _dispatch(self, frame: Frame) -> None:
        kind, number = frame.kind, frame.number
        if kind == REPLY:
            call = self._calls.get(number)
            if call is not None:
                call.finished = bool(frame.value & FINAL)
                call.replies.append(frame)
                if call.finished:
                    del self._calls[number]
                if call.arrived is not None:
                    call.arrived()
        elif kind == CANCEL:
            if len(self.cancelled) > _MAX_CANCELLED:  # of requests that ended meanwhile
                self.cancelled = {each for each in self.cancelled if each in self.credits}
            self.cancelled.add(number)
            if self.loop is not None:
                self.loop.call_soon_threadsafe(self.abandoned, number)
        elif kind == CREDIT:
            if number in self.credits:
                self.credits[number] += frame.value
        else:
            self.inbox.append(frame)
            if self.loop is not None:
                self.loop.call_soon_threadsafe(self.arrived)

    def _wake(self) -> None:
        for event in list(self._waiting):
            event.set()

    def close(self) -> None:
        """Close the socket; in a forked child, which must not use it, and no region either."""
        self._stream.close()
        self._regions = SentRegions()


def encode(meta: Any) -> bytes:
    return _json(meta).encode("utf-8", "replace")


#: For hashable values that come again and again.
_encode_again = functools.lru_cache(256)(encode)
