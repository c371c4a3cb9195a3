"""Progress of a run: a live line on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table

from modelport.loadtests.load.run import RunProgress
from modelport.loadtests.load.samples import LoadProfile, Outcome, Samples
from modelport.loadtests.load.target import LoadTestTarget

#: Only the last seconds' figures are shown, so that changes are visible at once.
WINDOW_SECONDS = 3.0
#: Interval between lines in a log.
LINE_SECONDS = 10.0
REFRESHES_PER_SECOND = 8


class Recent:
    """The samples of the last seconds, and counts of all."""

    def __init__(self) -> None:
        self.requests = self.bad = 0
        self._window: deque[Samples] = deque()
        self._now = 0.0

    def add(self, samples: Samples) -> None:
        if not len(samples):
            return
        self.requests += len(samples)
        self.bad += int(np.count_nonzero(samples["outcome"] != Outcome.OK))
        self._now = max(self._now, float(samples["done"].max()))
        self._window.append(samples)
        while float(self._window[0]["done"].max()) < self._now - WINDOW_SECONDS:
            self._window.popleft()

    def line(self) -> str:
        """The recent figures in one line."""
        if not self._window:
            return "no response yet"
        found = np.concatenate(list(self._window))
        good = found[found["outcome"] == Outcome.OK]
        seconds = max(min(WINDOW_SECONDS, self._now), 1e-9)
        told = f"{len(good) / seconds:,.0f} correct answers/s"
        if len(good):
            p50, p99 = np.quantile(good["done"] - good["intended"], (0.5, 0.99)) * 1e3
            told += f", p50 {p50:.2f} ms, p99 {p99:.2f} ms"
        return f"{told}, {self.requests:,} sent, {self.bad:,} failed"


@contextlib.contextmanager
def live(
    target: LoadTestTarget, load: LoadProfile, console: Console, *, quiet: bool = False
) -> Iterator[Callable[[RunProgress], None] | None]:
    """A callback for ``measure`` that shows the progress of ``load`` while the block runs."""
    if quiet:
        yield None
    elif console.is_terminal:
        with _bar(target, load, console) as callback:
            yield callback
    else:
        yield _lines(console)


@contextlib.contextmanager
def _bar(
    target: LoadTestTarget, load: LoadProfile, console: Console
) -> Iterator[Callable[[RunProgress], None]]:
    total = load.warmup_seconds + load.duration_seconds
    bars = Bars(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[s]}"),
    )
    task = bars.add_task("preparing", total=total, s="")
    recent = Recent()

    def table() -> Table:
        grid = Table.grid()
        grid.add_row(bars)
        grid.add_row(f"  {recent.line()}")
        return grid

    with Live(table(), console=console, refresh_per_second=REFRESHES_PER_SECOND) as shown:

        def progress(seen: RunProgress) -> None:
            recent.add(seen.samples)
            if seen.seconds:
                warming = seen.seconds < load.warmup_seconds
                name = "warming up" if warming else target.url
                told = f"{min(seen.seconds, total):.0f} of {total:.0f} s"
                bars.update(task, completed=seen.seconds, description=name, s=told)
            shown.update(table())

        yield progress


def _lines(console: Console) -> Callable[[RunProgress], None]:
    recent = Recent()
    told = time.monotonic()

    def progress(seen: RunProgress) -> None:
        nonlocal told
        recent.add(seen.samples)
        if time.monotonic() - told >= LINE_SECONDS:
            told = time.monotonic()
            console.print(f"{seen.seconds:.0f} s: {recent.line()}", highlight=False)

    return progress
