"""Progress of a command on standard error: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

import click

#: Interval between lines in a log; many CI systems end a job that is silent for minutes.
LINE_SECONDS = 10.0
#: A stage of unknown length says how long it has lasted from this time on.
TOLD_SECONDS = 10.0
#: Intervals between updates on a terminal, of progress and of time alone.
FRAME_SECONDS, SECOND = 0.1, 1.0
#: The width of the bar, and what empties the line.
BAR_WIDTH, CLEAR = 20, "\r\x1b[K"
#: Called with the stage's name, the amount done and the total; 0 of 0 means unknown.
Show = Callable[[str, int, int], None]


class Heartbeat:
    """A context manager that repeats ``text`` with the elapsed time.

    It runs in its own thread, because the work may take minutes.
    """

    def __init__(self, tell: Callable[[str], None], seconds: float | None = None) -> None:
        self.text: object = "starting"
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

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


@contextlib.contextmanager
def _stderr() -> Iterator[Callable[[str], None]]:
    """Yield a function that writes to standard error even while converters are muted."""
    stream = sys.stderr
    try:
        descriptor = os.dup(stream.fileno())
    # a stream without a file descriptor, or no stream
    except (OSError, ValueError, AttributeError):
        yield lambda text: click.echo(text, file=stream, nl=False)
        return

    def write(text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(descriptor, text.encode(errors="replace"))

    try:
        yield write
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def log() -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a line to standard error even while converters are muted."""
    with _stderr() as write:
        yield lambda text: write(f"modelport: {text}\n")


@contextlib.contextmanager
def heartbeat() -> Iterator[Heartbeat]:
    """Write a line to standard error every ``LINE_SECONDS``."""
    with log() as tell, Heartbeat(tell) as beating:
        yield beating


@contextlib.contextmanager
def progress_bar(quiet: bool = False) -> Iterator[Show]:
    """Yield a callback that shows the stages of a command on standard error."""
    if quiet:
        yield lambda stage, done, total: None
    elif sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _status_line() as show:
            yield show
    else:
        with heartbeat() as beating:
            estimate = beating.text = Estimate()
            yield estimate.tell


class Estimate:
    """The latest stage, its share that is done, and the time that the rest will take."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stage, self._done, self._total = "starting", 0, 0
        self._began = self._told = clock()

    def tell(self, stage: str, done: int, total: int) -> None:
        """Take what a stage has done; 0 of 0 is unknown.

        A stage of the same total that does not begin again is the last one's next part.
        """
        self._told = self._clock()
        goes_on = 0 < total == self._total and done >= self._done
        if stage != self._stage and not goes_on:
            self._began = self._told
        self._stage, self._done, self._total = stage, done, total

    @property
    def share(self) -> float:
        """The share that is done; 0 if it is unknown."""
        return self._done / self._total if self._total else 0.0

    def __str__(self) -> str:
        if not self._total:
            lasted = self._clock() - self._began
            return (
                f"{self._stage}, {lasted:.0f} s so far" if lasted >= TOLD_SECONDS else self._stage
            )
        shown = f"{self._stage}, {self.share:.0%}"
        if not 0 < self._done < self._total or self._told == self._began:
            return shown
        whole = (self._told - self._began) * self._total / self._done
        return f"{shown}, about {max(1, whole - (self._clock() - self._began)):.0f} s left"


@contextlib.contextmanager
def _status_line() -> Iterator[Show]:
    """Yield a callback that shows the stage in one line of a terminal, which is cleared in the
    end."""
    began, latest, estimate = time.monotonic(), ("", 0.0), Estimate()
    with _stderr() as write:

        def draw(_: str = "") -> None:
            bar = "━" * int(BAR_WIDTH * estimate.share)
            text = f"{bar:<{BAR_WIDTH}} {time.monotonic() - began:3.0f} s  {estimate}"
            write(f"{CLEAR}{text[: shutil.get_terminal_size().columns - 1]}")

        def show(stage: str, done: int, total: int) -> None:
            nonlocal latest
            estimate.tell(stage, done, total)
            now = time.monotonic()
            if stage != latest[0] or now - latest[1] >= FRAME_SECONDS:
                latest = (stage, now)
                draw()

        try:
            with Heartbeat(draw, SECOND):  # a conversion tells nothing for minutes
                yield show
        finally:
            write(CLEAR)
