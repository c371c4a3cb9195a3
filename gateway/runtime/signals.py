"""Signals of a gateway: those that ask it to stop, SIGHUP and SIGUSR1."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Sequence


def ending() -> list[signal.Signals]:
    """Return SIGTERM, SIGINT, and SIGHUP unless ``nohup`` ignores it."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hang_up]


def handle(number: signal.Signals, callbacks: Sequence[Callable[[], object]]) -> None:
    """Call ``callbacks`` on SIGUSR1 or SIGHUP, which ends the process if there are none.

    A gateway in a thread of another program leaves its signals alone.
    """

    def call_all() -> None:
        for each in callbacks:
            each()

    if callbacks and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(number, call_all)
