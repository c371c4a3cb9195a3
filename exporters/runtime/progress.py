"""Progress of a command on standard error: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

#: Interval between lines in a log; many CI systems end a job that is silent for minutes.
LINE_SECONDS = 10.0
#: Called with the stage's name, the amount done and the total; 0 of 0 means unknown.
Show = Callable[[str, int, int], None]


class Heartbeat:
    """A context manager that repeats ``text`` with the elapsed time.

    It runs in its own thread, because the work may take minutes.
    """

    def __init__(self, tell: Callable[[str], None], seconds: float | None = None) -> None:
        self.text = "starting"
        self._tell = tell
        self._seconds = LINE_SECONDS if seconds is None else seconds
        self._began = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def _run(self) -> None:
        while not self._done.wait(self._seconds):
            self._tell(f"{time.monotonic() - self._began:.0f} s: {self.text}")

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()


@contextlib.contextmanager
def log() -> Iterator[Callable[[str], None]]:
    """Yield a function that writes to standard error even while converters are muted."""
    stream = sys.stderr
    try:
        descriptor = os.dup(stream.fileno())
    # a stream without a file descriptor, or no stream
    except (OSError, ValueError, AttributeError):
        yield lambda text: click.echo(f"modelport: {text}", file=stream)
        return

    def write(text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(descriptor, f"modelport: {text}\n".encode(errors="replace"))

    try:
        yield write
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def heartbeat() -> Iterator[Heartbeat]:
    """Write a line to standard error every ``LINE_SECONDS``."""
    with log() as tell, Heartbeat(tell) as beating:
        yield beating


@contextlib.contextmanager
def progress_bar(quiet: bool = False) -> Iterator[Show]:
    """Yield a callback that shows the stages of a command on standard error."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        yield lambda stage, done, total: None
    elif console.is_terminal:
        with _bar(console) as show:
            yield show
    else:
        with heartbeat() as beating:
            yield lambda stage, done, total: setattr(beating, "text", _line(stage, done, total))


def _line(stage: str, done: int, total: int) -> str:
    return f"{stage}, {done} of {total}" if total else stage


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Show]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(stage: str, done: int, total: int) -> None:
            bar.tasks[task].total = total or None  # update() would read None as "unchanged"
            bar.update(task, description=stage, completed=done)

        yield show
