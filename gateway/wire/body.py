"""The body of one gRPC request or reply, put together from the pieces in which it comes."""

from __future__ import annotations

import numpy as np

PREFIX_BYTES = 5
#: Room is made for this much, and for four times what has come: of what is announced no more.
#: gRPC's own default limit is as much.
ROOM_BYTES = 4 * 2**20
_GROWTH = 4


class Body:
    """One message with its prefix, or the beginning of several.

    What is large can be read off the socket into its place, see ``place``: then it is never copied.
    """

    __slots__ = ("_store", "_view", "expected", "size")

    def __init__(self) -> None:
        self._view = memoryview(bytearray())
        self._store: object = self._view.obj
        self.size = 0
        #: The bytes of the first message with its prefix, once they are known.
        self.expected = 0

    def add(self, part: memoryview) -> None:
        size = self.size + len(part)
        if part.obj is self._store:  # it is in its place already
            self.size = size
            return
        if not self.expected and size >= PREFIX_BYTES:
            prefix = bytes(self._view[: self.size]) + bytes(part[:PREFIX_BYTES])
            self.expected = int.from_bytes(prefix[1:PREFIX_BYTES]) + PREFIX_BYTES
        if size > len(self._view):
            self._grow(size)
        self._view[self.size : size] = part
        self.size = size

    def place(self) -> memoryview:
        """Where the next bytes of the first message go; empty where that is complete."""
        if self.size >= self.expected:
            return self._view[:0]
        if self.size == len(self._view):
            self._grow(self.size + 1)
        return self._view[self.size : self.expected]

    def view(self) -> memoryview:
        """All that has come."""
        return self._view[: self.size].toreadonly()

    def _grow(self, size: int) -> None:
        # Memory that nobody touches costs nothing.
        room = min(self.expected, max(ROOM_BYTES, _GROWTH * size))
        if room < size:
            room = 2 * size
        view = np.empty(room, np.uint8).data
        view[: self.size] = self._view[: self.size]
        self._view, self._store = view, view.obj
