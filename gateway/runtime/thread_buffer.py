"""Buffers that a thread has once."""

from __future__ import annotations

import threading


class ThreadBuffer(threading.local):
    """A read buffer that the connections of a thread, and so of an event loop, share."""

    def __init__(self, size: int) -> None:
        self.view = memoryview(bytearray(size))
