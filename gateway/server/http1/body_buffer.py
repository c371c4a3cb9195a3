"""One buffer for a body that comes in parts."""

from __future__ import annotations

import numpy as np

from modelport.gateway.wire.raw_tensors import Buffer

#: Memory is allocated for this many times what has been received, up to the stated length. Nothing
#: counts it before it is written to, so a length that is only stated must not claim much.
AHEAD, UNSTATED_AHEAD = 16, 2


class BodyBuffer:
    """The parts of a body, whose ``length`` the client states, or 0."""

    __slots__ = ("_array", "_length", "_size")

    def __init__(self, part: bytes, length: int) -> None:
        self._array = np.frombuffer(part, np.uint8)
        self._length, self._size = length, len(part)

    def add(self, part: Buffer) -> None:
        start, end = self._size, self._size + len(part)
        if end > len(self._array):
            room = UNSTATED_AHEAD * end
            if self._length >= end:
                room = min(AHEAD * end, self._length)
            # numpy asks for large pages, and writes nothing to them.
            grown = np.empty(room, np.uint8)
            grown[:start] = self._array[:start]
            self._array = grown
        self._array[start:end] = np.frombuffer(part, np.uint8)
        self._size = end

    def content(self) -> memoryview:
        """The parts as one, which cannot be written to."""
        self._array.setflags(write=False)
        return self._array.data[: self._size]
