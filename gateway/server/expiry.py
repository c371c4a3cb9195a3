"""The time limit of a connection, which moves on with what the client does."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Expiry:
    """Calls ``expired`` once no ``after`` or ``stop`` has moved the moment on.

    There is one timer: when it is due it looks whether the moment has moved, so that to move it
    costs nothing.
    """

    __slots__ = ("_at", "_expired", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop, self._expired = loop, expired
        self._at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def after(self, seconds: float) -> None:
        """Expire in ``seconds``, and not before."""
        self._at = at = self._loop.time() + seconds
        if self._timer is None:
            self._timer = self._loop.call_at(at, self._look)
        elif self._timer.when() > at:
            self._timer.cancel()
            self._timer = self._loop.call_at(at, self._look)

    def stop(self) -> None:
        """Do not expire."""
        self._at = math.inf

    def close(self) -> None:
        """Never expire, and hold no timer."""
        self._at = math.inf
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._loop.time() >= self._at:
            self._expired()
        elif self._at != math.inf:
            self._timer = self._loop.call_at(self._at, self._look)
