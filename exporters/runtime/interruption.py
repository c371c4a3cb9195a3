"""Signals that end a command: temporary files are removed, whatever the command is doing.

A signal raises ``Interrupted`` in the main thread, so that every ``finally`` runs. That thread may
be in a converter's compiled code, which returns to Python much later, or in a callback, which
swallows exceptions. Then another thread does the most important cleanups and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import click

from modelport.gateway.cli.errors import Interrupted, OneLineCommand, exit_code

#: The time that the main thread has to end the command.
GRACE_SECONDS = 2.0
#: Cleanups of the blocks that the program is in. The main thread changes it, and any thread may
#: run them.
_cleanups: list[Callable[[], None]] = []


class InterruptibleCommand(OneLineCommand):
    """A command that SIGTERM and SIGHUP end as Ctrl-C does."""

    def invoke(self, ctx: click.Context) -> Any:
        with interruptible():
            return super().invoke(ctx)


@contextlib.contextmanager
def finally_call(cleanup: Callable[[], None]) -> Iterator[None]:
    """Call ``cleanup`` after the block, or when a signal ends the process in the block."""
    _cleanups.append(cleanup)
    try:
        yield
    finally:
        cleanup()
        _cleanups.remove(cleanup)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """End the block on SIGINT, SIGTERM and SIGHUP, unless the process ignores them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {number: signal.signal(number, _raise) for number in numbers}
    other = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(reader, ended), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(other)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)
        watcher.join()
        os.close(reader)


def _raise(number: int, frame: FrameType | None) -> None:
    if (
        frame is not None
        and frame.f_code.co_name == "cb"
        and "importlib" in frame.f_code.co_filename
    ):
        signal.raise_signal(number)  # soon: an exception in a callback of importlib would be lost
        return
    raise Interrupted(number)


def _watch(reader: int, ended: threading.Event) -> None:
    """End the process if the main thread does not do so after a signal."""
    stderr = _duplicate_of_stderr()
    received = os.read(reader, 1)
    if received and not ended.wait(GRACE_SECONDS):
        error = Interrupted(received[0])
        for _ in range(2):  # the main thread may still be writing
            for cleanup in reversed(_cleanups):
                cleanup()
        os.write(stderr, f"modelport: error: {error}\n".encode())
        os._exit(exit_code(error))
    os.close(stderr)


def _duplicate_of_stderr() -> int:
    """A descriptor of standard error that stays while converters are muted."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.dup(sys.stderr.fileno())
    return os.open(os.devnull, os.O_WRONLY)
