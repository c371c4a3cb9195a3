"""Buffer for the body of a gRPC request or response."""

from __future__ import annotations

import numpy as np

PREFIX_BYTES = 5
#: The buffer starts with this size (gRPC's default message limit), and grows to four times what was
#: received: an announced length alone allocates no more.
ROOM_BYTES = 4 * 2**20
_GROWTH = 4


class Body:
    """One message with its prefix, or the beginning of several.

    A large message can be received directly into ``place``, without a copy.
    """

    __slots__ = ("_store", "_view", "expected", "size")

    def __init__(self) -> None:
        self._view = memoryview(bytearray())
        self._store: object = self._view.obj
        self.size = 0
        #: Size of the first message with its prefix; 0 until it is known.
        self.expected = 0

    def add(self, part: memoryview) -> None:
        size = self.size + len(part)
        if part.obj is self._store:  # received into ``place``
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
        """Return the buffer for the rest of the first message; empty if it is complete."""
        if self.size >= self.expected:
            return self._view[:0]
        if self.size == len(self._view):
            self._grow(self.size + 1)
        return self._view[self.size : self.expected]

    def view(self) -> memoryview:
        """Return everything received so far."""
        return self._view[: self.size].toreadonly()

    def _grow(self, size: int) -> None:
        # Untouched pages of ``np.empty`` take no memory.
        room = min(self.expected, max(ROOM_BYTES, _GROWTH * size))
        if room < size:
            room = 2 * size
        view = np.empty(room, np.uint8).data
        view[: self.size] = self._view[: self.size]
        self._view, self._store = view, view.obj
