"""Progress of a gate: a bar on a terminal; in a log, one line per look and one every ten
seconds."""

from __future__ import annotations

import contextlib

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from modelport.gateway.runtime.progress import Heartbeat, heartbeat
from modelport.loadtests.gate.criteria import SideMeasurements
from modelport.loadtests.gate.gate import GateRequest, GateSnapshot
from modelport.loadtests.number_format import change, duration


class GateProgress:
    """A context manager that shows the progress of one gate."""

    def __init__(self, asked: GateRequest, console: Console) -> None:
        most = asked.slo.duration.max_seconds
        self._console = console
        self._found = ""
        self._looked: tuple[object, ...] = ()
        self._progress = Progress(
            TextColumn("[bold]gate[/bold]"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn(f"of {duration(most)} at most"),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._heartbeat: Heartbeat | None = None
        self._task: TaskID = self._progress.add_task("", total=most)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> GateProgress:
        self._stack.enter_context(self._progress)
        if not self._console.is_terminal:
            self._heartbeat = self._stack.enter_context(heartbeat())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def say(self, text: str) -> None:
        described = f"{text}{self._found}"
        elapsed = self._progress.tasks[self._task].elapsed or 0.0
        self._progress.update(self._task, description=described, completed=elapsed)
        if self._heartbeat is not None:
            self._heartbeat.text = described

    def watch(self, watching: GateSnapshot) -> None:
        self._found = f" · so far {_so_far(watching)}"
        if watching.questions is self._looked:
            return
        self._looked = watching.questions
        open_ones = [one.name for one in watching.questions if str(one.status) == "inconclusive"]
        state = f"open: {', '.join(open_ones)}" if open_ones else "all decided"
        self._console.print(
            f"{duration(watching.seconds)}, {len(watching.rounds)} rounds: "
            f"{_so_far(watching)}; {state}",
            highlight=False,
        )


def _so_far(watching: GateSnapshot) -> str:
    """The plain ratios so far, without statistics."""
    baseline = [one.baseline for one in watching.rounds]
    candidate = [one.candidate for one in watching.rounds]
    parts = []
    for q in (0.5, 0.99):
        below, above = _quantile(baseline, q), _quantile(candidate, q)
        if below and above:
            parts.append(f"p{100 * q:g} {change(above / below)}")
    return ", ".join(parts) or "no response yet"


def _quantile(halves: list[SideMeasurements], q: float) -> float | None:
    every = np.concatenate([half.latencies_ms for half in halves])
    return float(np.quantile(every, q)) if every.size else None
