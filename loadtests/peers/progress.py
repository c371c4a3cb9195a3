"""Where a long run is: one line, written over, on a terminal; a line for each step elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """``total_seconds`` is what the run is believed to take."""

    def __init__(self, total_seconds: float, out: TextIO = sys.stderr) -> None:
        self._begin = time.monotonic()
        self._total = total_seconds
        self._out = out
        self._over = "\r\033[K" if out.isatty() else ""

    def say(self, what: str) -> None:
        gone = time.monotonic() - self._begin
        line = f"[{clock(gone)} of about {clock(max(gone, self._total))}] {what}"
        self._out.write(f"{self._over}{line}" if self._over else f"{line}\n")
        self._out.flush()

    def trouble(self, what: str) -> None:
        """A line that stays."""
        self._out.write(f"{self._over}{what}\n")
        self._out.flush()

    def end(self) -> None:
        self._out.write(self._over)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
