"""Signals that end a command: every ``finally`` runs, so that temporary files are removed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import click

from modelport.gateway.cli.errors import Interrupted, OneLineCommand


class InterruptibleCommand(OneLineCommand):
    """A command that SIGTERM and SIGHUP end as Ctrl-C does."""

    def invoke(self, ctx: click.Context) -> Any:
        with interruptible():
            return super().invoke(ctx)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise ``Interrupted`` in the block on SIGTERM, and on SIGHUP unless ``nohup`` ignores it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, _raise) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)
