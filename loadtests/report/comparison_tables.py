"""Tables of a comparison, the same in HTML, Markdown and on a console."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelport.loadtests import number_format
from modelport.loadtests.compare.result import Candidate, Comparison, Measured
from modelport.loadtests.report import loads
from modelport.loadtests.report.loads import LoadKey


@dataclass(frozen=True)
class TableRow:
    """A row of a table; ``number`` is its candidate's."""

    name: str
    cells: tuple[str, ...]
    number: int | None = None
    disqualified: bool = False


@dataclass(frozen=True)
class Table:
    """A table; ``head`` names the cells, without the column of row names."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[TableRow, ...]
    first: str = "candidate"


@dataclass(frozen=True)
class _Column:
    title: str
    unit: str
    values: Callable[[Candidate], Sequence[float]]


def _one(value: float | None) -> Sequence[float]:
    return () if value is None else (value,)


def _rates(candidate: Candidate) -> Sequence[float]:
    """The rates; a round in which no rate held counts as 0, as in the verdict."""
    return [rate or 0.0 for rate in candidate.rate_under_slo]


def candidates(comparison: Comparison) -> Table:
    """The compared candidates: formats, backends, sizes, and figures of the certificates."""
    metric = next((c.metric_name for c in comparison.candidates if c.metric_name), "metric")
    columns = (
        _Column("artifact", "bytes", lambda c: (c.artifact_bytes,)),
        _Column("largest absolute error", "", lambda c: _one(c.max_abs_error)),
    )
    exact: tuple[tuple[str, Callable[[Candidate], str]], ...] = (
        ("agreement", lambda c: number_format.with_unit(_percent(c.agreement), "%")),
        ("certified speed-up", _speedup),
        (metric, lambda c: number_format.NOTHING if c.metric is None else f"{c.metric:.4f}"),
    )
    told = [_cells(comparison, column) for column in columns]
    rows = tuple(
        TableRow(
            candidate.name,
            (
                candidate.format,
                candidate.precision,
                candidate.backend,
                "its own ports" if candidate.direct else "the gateway",
                *(cells[number - 1] for _, cells in told),
                *(tell(candidate) for _, tell in exact),
            ),
            number,
            candidate.disqualified is not None,
        )
        for number, candidate in enumerate(comparison.candidates, start=1)
    )
    heads = [head for head, _ in told] + [title for title, _ in exact]
    head = ("format", "precision", "backend", "called at", *heads)
    return _dense(Table("Candidates, with the figures in their certificates", head, rows))


def resources(comparison: Comparison) -> Table:
    """Figures that belong to no single load: starts, memory, highest rate, CPU, cost."""
    bound = f"{number_format.stated(comparison.slo_p99_ms)} ms"
    columns = (
        _Column("start to READY", "s", lambda c: c.cold_start_seconds),
        _Column("start to first correct answer", "s", lambda c: c.cold_first_response_seconds),
        _Column("memory", "bytes", lambda c: c.memory_bytes),
        _Column(f"highest rate, p99 under {bound}", "requests/s", _rates),
        _Column("CPU per request", "s", lambda c: c.cpu_seconds_per_request),
        _Column("cost per million", comparison.currency, lambda c: _one(c.cost_per_million)),
    )
    told = [_cells(comparison, column) for column in columns]
    rows = tuple(
        TableRow(c.name, tuple(cells[n - 1] for _, cells in told), n, c.disqualified is not None)
        for n, c in enumerate(comparison.candidates, start=1)
    )
    caption = "Starts, memory, highest rate and CPU: median of the rounds (lowest to highest)"
    return _dense(Table(caption, tuple(head for head, _ in told), rows))


#: Title, unit and value of each figure of a run.
_FIGURES: tuple[tuple[str, str, Callable[[Measured], float]], ...] = (
    ("correct answers/s", "", lambda run: run.requests_per_second),
    ("p50", "ms", lambda run: run.latency.p50),
    ("p90", "ms", lambda run: run.latency.p90),
    ("p95", "ms", lambda run: run.latency.p95),
    ("p99", "ms", lambda run: run.latency.p99),
    ("p99.9", "ms", lambda run: run.latency.p999),
    ("max", "ms", lambda run: run.latency.maximum),
    ("first byte p50", "ms", lambda run: run.first_byte.p50),
    ("first byte p99", "ms", lambda run: run.first_byte.p99),
)
_COUNTS: tuple[tuple[str, Callable[[Measured], int]], ...] = (
    ("requests", lambda run: run.requests),
    ("wrong", lambda run: run.wrong),
    ("refused", lambda run: run.refused),
    ("failed", lambda run: run.failed),
)


def of_load(comparison: Comparison, load: LoadKey) -> Table:
    """Every figure of a load: its median over the rounds, and its spread."""
    measured = loads.by_load(comparison.candidates)[load]
    foreign = loads.other_protocols(load, measured)
    groups = [
        (f", in {foreign[number]}" if number in foreign else "", number, runs)
        for number, runs in measured.items()
    ]
    return _summed(comparison, f"{load.title}: median of the rounds (lowest to highest)", groups)


def of_others(comparison: Comparison) -> Table | None:
    """Loads of few candidates, which the search for the highest rate tried."""
    every = loads.by_load(comparison.candidates)
    shown = loads.shared(every)
    groups = [
        (f", {load.in_protocol(runs[0].protocol).title}", number, runs)
        for load, measured in every.items()
        if load not in shown
        for number, runs in measured.items()
    ]
    groups.sort(key=lambda group: group[1])
    caption = "Other loads, which the search for the highest rate tried"
    return _summed(comparison, caption, groups) if groups else None


def _summed(
    comparison: Comparison, caption: str, groups: Sequence[tuple[str, int, Sequence[Measured]]]
) -> Table:
    """A row for each group: the candidate's name with a suffix, its number, its runs."""
    units = {}
    for title, unit, value in _FIGURES:
        found = [statistics.median(map(value, runs)) for _, _, runs in groups]
        units[title] = number_format.scale(statistics.median_low(found), unit)
    rows = tuple(
        TableRow(
            f"{comparison.candidates[number - 1].name}{suffix}",
            (
                *(
                    number_format.spread([value(run) / units[title][0] for run in runs])
                    for title, _, value in _FIGURES
                ),
                *(f"{sum(count(run) for run in runs):,}" for _, count in _COUNTS),
            ),
            number,
            comparison.candidates[number - 1].disqualified is not None,
        )
        for suffix, number, runs in groups
    )
    titles = [_head(title, units[title][1]) for title, _, _ in _FIGURES]
    return Table(caption, (*titles, *(title for title, _ in _COUNTS)), rows)


def of_rounds(comparison: Comparison, load: LoadKey) -> Table:
    """The figures of each round."""
    measured = loads.by_load(comparison.candidates)[load]
    rows = tuple(
        TableRow(
            f"{comparison.candidates[number - 1].name}, "
            + (f"in {run.protocol}, " if run.protocol != load.protocol else "")
            + f"round {run.round + 1}",
            (
                *(number_format.figure(value(run)) for _, _, value in _FIGURES),
                *(f"{count(run):,}" for _, count in _COUNTS),
                number_format.with_unit(run.server_cpu_seconds, "s"),
            ),
            number,
            comparison.candidates[number - 1].disqualified is not None,
        )
        for number, runs in measured.items()
        for run in runs
    )
    titles = [_head(title, unit) for title, unit, _ in _FIGURES]
    head = (*titles, *(title for title, _ in _COUNTS), "server's CPU")
    return Table(f"{load.title}: each round", head, rows)


def errors(comparison: Comparison) -> Table | None:
    """Every error message with its count; None if there was none."""
    rows = []
    for number, candidate in enumerate(comparison.candidates, start=1):
        counts: dict[str, int] = {}
        for run in candidate.runs:
            for message, count in run.errors.items():
                counts[message] = counts.get(message, 0) + count
        out = candidate.disqualified is not None
        for message, count in sorted(counts.items(), key=lambda item: -item[1]):
            rows.append(TableRow(candidate.name, (f"{count:,}", message), number, out))
    return Table("Errors", ("times", "message"), tuple(rows)) if rows else None


def _speedup(candidate: Candidate) -> str:
    if candidate.speedup is None:
        return number_format.NOTHING
    rows = candidate.speedup_rows
    return f"{candidate.speedup:.2f}x" + (f", {rows} rows" if rows else "")


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100


def _cells(comparison: Comparison, column: _Column) -> tuple[str, list[str]]:
    """The column's head with its unit, and a cell for every candidate."""
    values = [column.values(candidate) for candidate in comparison.candidates]
    middles = [statistics.median(found) for found in values if found]
    divisor, unit = number_format.scale(
        statistics.median_low(middles) if middles else 0.0, column.unit
    )
    cells = [number_format.spread([value / divisor for value in found]) for found in values]
    return _head(column.title, unit), cells


def _head(title: str, unit: str) -> str:
    return f"{title}, {unit}" if unit else title


def _dense(table: Table) -> Table:
    """Remove empty columns."""
    kept = [
        place
        for place in range(len(table.head))
        if any(row.cells[place] != number_format.NOTHING for row in table.rows)
    ]
    rows = tuple(
        TableRow(row.name, tuple(row.cells[p] for p in kept), row.number, row.disqualified)
        for row in table.rows
    )
    return Table(table.caption, tuple(table.head[p] for p in kept), rows, table.first)
