"""Reports on a terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from modelport.loadtests import number_format
from modelport.loadtests.checks import Check, CheckStatus, worst
from modelport.loadtests.compare.result import Comparison
from modelport.loadtests.gate.decision import GateDecision
from modelport.loadtests.load.samples import LoadRun
from modelport.loadtests.load.summary import summarise
from modelport.loadtests.report import (
    comparison_tables,
    gate_tables,
    loads,
    matrix_text,
    run_tables,
    text_escaping,
)
from modelport.loadtests.report.comparison_tables import Table

#: Width of a pipe, so wide that no cell is folded and messages stay in one piece.
PIPE_WIDTH = 100_000
STYLES = {
    CheckStatus.PASS: "green",
    CheckStatus.FAIL: "bold red",
    CheckStatus.INCONCLUSIVE: "yellow",
}
NOISE_STYLES = {"beyond": "green", "within": "yellow", "alone": "dim", "nobody": "dim"}


def standard() -> Console:
    """Standard output, as wide as the terminal, or as its tables in a file or a pipe."""
    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=PIPE_WIDTH)


def comparison(found: Comparison, console: Console) -> None:
    """Print the matrix, costs, disqualified and absent candidates."""
    grid = _grid("Verdict", ("concern", "winner", "by how much", "certainty"))
    for line in matrix_text.lines(found):
        winner = Text(number_format.NOTHING)
        if line.winner is not None:
            winner = Text(_name(line.winner.number, line.winner.name), "bold")
            winner.append(f" {text_escaping.line(line.winner.figure)}", "dim not bold")
        margin = text_escaping.line(line.margin)
        if line.second is not None:
            margin += f" {_name(line.second.number, line.second.name)}"
        style = NOISE_STYLES[line.noise]
        certainty = Text(matrix_text.NOISE[line.noise], style)
        grid.add_row(Text(text_escaping.line(line.concern)), winner, Text(margin), certainty)
    console.print(grid)
    for load in loads.shared(loads.by_load(found.candidates)):
        console.print(_of(comparison_tables.of_load(found, load), 6))
    console.print(_of(comparison_tables.resources(found)))
    for number, candidate in enumerate(found.candidates, start=1):
        if candidate.disqualified:
            why = f"{_name(number, candidate.name)}: {text_escaping.line(candidate.disqualified)}"
            console.print(Text.assemble(("disqualified ", "bold red"), why))
    for absent in found.absent:
        why = f"{text_escaping.line(absent.name)}: {text_escaping.line(absent.why)}"
        console.print(Text.assemble(("not measured ", "yellow"), why))


def run(found: LoadRun, objectives: Sequence[Check], console: Console) -> None:
    """Print one run: rates, percentiles, outcomes, errors, objectives."""
    summary = summarise(found)
    console.print(Text(run_tables.load(found), "dim"))
    rate = number_format.figure(summary.requests_per_second)
    console.print(Text.assemble((rate, "bold"), " correct answers per second"))
    console.print(_of(run_tables.percentiles(summary)))
    grid = _grid("", ("outcome", "requests", "share"))
    for name, count, share in run_tables.counts(summary):
        style = "green" if name == "correct" else "red"
        told = f"{number_format.figure(share * 100)} %"
        grid.add_row(Text(name, style), Text(f"{count:,}"), Text(told))
    console.print(grid)
    for message, count in summary.errors.items():
        console.print(Text.assemble((f"{count:,} x ", "red"), text_escaping.line(message, 300)))
    for warning in run_tables.warnings(found):
        console.print(Text.assemble(("warning: ", "yellow"), warning))
    if objectives:
        checks(objectives, console)
        status = worst(objectives)
        console.print(Text(status.upper(), STYLES[status]))


def checks(found: Sequence[Check], console: Console) -> None:
    grid = _grid("", ("check", "verdict", "observed", "limit", "details"))
    for check in found:
        cells = (check.observed, check.bound, check.detail)
        told = (Text(text_escaping.line(cell)) for cell in cells)
        status = Text(str(check.status), STYLES[check.status])
        grid.add_row(Text(text_escaping.line(check.name)), status, *told)
    console.print(grid)


def decision(found: GateDecision, console: Console) -> None:
    """Print every question, then the verdict and its grounds."""
    checks(found.checks, console)
    summaries = gate_tables.summaries(found)
    if summaries is not None:
        console.print(_of(summaries))
    if found.agreement is not None:
        console.print(Text(gate_tables.agreement(found.agreement)))
        if (by_label := gate_tables.labels(found.agreement)) is not None:
            console.print(_of(by_label))
    for note in found.notes:
        console.print(Text(text_escaping.line(note), "dim"))
    console.print(
        Text.assemble(
            (found.status.upper(), STYLES[found.status]), f"  {gate_tables.sentence(found)}"
        )
    )


def _of(found: Table, most: int | None = None) -> Grid:
    """The first ``most`` columns; the reports have all of them."""
    grid = _grid(found.caption, (found.first, *found.head[:most]))
    for row in found.rows:
        name = Text(_name(row.number, row.name), "red strike" if row.disqualified else "")
        grid.add_row(name, *(Text(text_escaping.line(cell)) for cell in row.cells[:most]))
    return grid


def _grid(title: str, head: Sequence[str]) -> Grid:
    caption = Text(text_escaping.line(title), "bold") if title else None
    grid = Grid(title=caption, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in head:
        grid.add_column(Text(text_escaping.line(name)), overflow="fold")
    return grid


def _name(number: int | None, name: str) -> str:
    plain = text_escaping.line(name, 80)
    return plain if number is None else f"{number} {plain}"
