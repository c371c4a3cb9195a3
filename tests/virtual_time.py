"""An event loop in virtual time: an hour takes seconds, however busy the machine is."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Selector(selectors.SelectSelector):
    """A selector that advances the clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing is left to do"
            self.now += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while all tasks sleep."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now
