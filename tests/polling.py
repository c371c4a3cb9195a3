"""Polling of conditions that no event announces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
#: Longer than anything takes on a busy machine.
WAIT_SECONDS = 90.0
#: For what must not need a limit in time of the gateway, such as ``BODY_IDLE_SECONDS``, to happen.
PROMPT_SECONDS = 25.0
#: Conditions often ask a server, which has other work to do.
PAUSE_SECONDS = 0.01


def eventually(condition: Callable[[], T], what: str = "", seconds: float = WAIT_SECONDS) -> T:
    """The first true value of ``condition``; fails when ``seconds`` have passed without one."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or condition}"
        time.sleep(PAUSE_SECONDS)
    return value


async def until(condition: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
    """Let other tasks run until ``condition`` is true; fails after ``seconds``."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)
