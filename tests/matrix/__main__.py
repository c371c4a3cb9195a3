"""``make matrix``: ask every demo model on every backend in every dialect, and print the table.

    python -m tests.matrix [--page FILE]

A cell is the largest error against the checkpoint in eager mode, over batches of 1, 2 and 8 and
three lengths. Exits with 1 if an answer is out of tolerance, if dialects of one backend differ in a
single bit, or if an error has another status than its protocol says.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from modelport.exporters.loaded_model import Source
from modelport.gateway.types import Array
from tests import verb
from tests.matrix import backends
from tests.matrix.backends import BackendRow
from tests.matrix.dialects import Asked, DialectColumn, Refused, dialects
from tests.torchserve.comparison import inputs_of, wire

BATCHES = (1, 2, 8)
LENGTHS = (1, 17, 64)
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"


@dataclass
class MatrixCell:
    """One dialect on one backend."""

    requests: int = 0
    error: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return f"{self.error:.1e}" if not self.wrong else f"WRONG ({len(self.wrong)})"


def cases(source: Source) -> Iterator[tuple[str, dict[str, Array], dict[str, Array]]]:
    """A name, inputs and expected outputs, both in the wire's shapes."""
    for batch in BATCHES:
        for length in LENGTHS if source.signature.axes else (0,):
            inputs = inputs_of(source, batch, length, seed=batch * 100 + length)
            expected = wire(source.signature.outputs, source.reference(inputs))
            yield f"batch {batch}, length {length}", wire(source.signature.inputs, inputs), expected


def check_row(
    row: BackendRow, sources: Mapping[str, Source], columns: Mapping[str, DialectColumn]
) -> dict[str, MatrixCell]:
    cells = {name: MatrixCell() for name in columns}
    for model, source in sources.items():
        for where, inputs, expected in cases(source):
            asked = Asked(row.models[model], source.signature, inputs)
            answers: dict[str, dict[str, Array]] = {}
            for name, dialect in columns.items():
                cells[name].requests += 1
                try:
                    answers[name] = dialect.ask(asked)
                except Refused as refused:
                    cells[name].wrong.append(f"{model}, {where}: {refused.status} {refused.text}")
            _compare(f"{model}, {where}", source, expected, answers, cells)
        _check_errors(model, row, source, columns, cells)
    return cells


def _compare(
    where: str,
    source: Source,
    expected: Mapping[str, Array],
    answers: Mapping[str, Mapping[str, Array]],
    cells: Mapping[str, MatrixCell],
) -> None:
    spec = source.spec
    first: dict[str, bytes] = {}
    for dialect, outputs in answers.items():
        cell = cells[dialect]
        for name, wanted in expected.items():
            got = outputs[name]
            if got.dtype != wanted.dtype or got.size != wanted.size:
                cell.wrong.append(f"{where}: '{name}' is {got.dtype} {got.shape}")
                continue
            error = np.abs(got.reshape(wanted.shape) - wanted)
            cell.error = max(cell.error, float(error.max()))
            if not (error <= spec.atol + spec.rtol * np.abs(wanted)).all():
                cell.wrong.append(f"{where}: '{name}' is off by {error.max():.1e}")
            if first.setdefault(name, got.tobytes()) != got.tobytes():
                cell.wrong.append(f"{where}: '{name}' is not bit-equal to {next(iter(answers))}")


def _check_errors(
    model: str,
    row: BackendRow,
    source: Source,
    columns: Mapping[str, DialectColumn],
    cells: Mapping[str, MatrixCell],
) -> None:
    """An unknown model, an input of another rank, too many rows, a value out of range."""
    _, inputs, _ = next(cases(source))
    name, good = next(iter(inputs.items()))
    bad = {
        "another rank": {**inputs, name: good[..., np.newaxis]},
        "a batch too large": {n: np.repeat(array, 9, axis=0) for n, array in inputs.items()},
    }
    if source.signature.inputs[0].maximum is not None:
        bad["a value out of range"] = {**inputs, name: good + 10**6}
    asked = Asked(row.models[model], source.signature, inputs)
    for dialect, column in columns.items():
        unknown = dataclasses.replace(asked, model="no-such-model")
        _expect(unknown, column, column.unknown, "unknown model", cells[dialect])
        for what, wrong in bad.items():
            broken = dataclasses.replace(asked, inputs=wrong)
            _expect(broken, column, column.invalid, f"{model}, {what}", cells[dialect])


def _expect(asked: Asked, dialect: DialectColumn, status: str, what: str, cell: MatrixCell) -> None:
    cell.requests += 1
    try:
        dialect.ask(asked)
    except Refused as refused:
        if refused.status != status:
            cell.wrong.append(f"{what}: {refused.status}, not {status}: {refused.text[:200]}")
    else:
        cell.wrong.append(f"{what}: answered, not {status}")


def markdown(table: Mapping[str, Mapping[str, MatrixCell]]) -> str:
    columns = list(next(iter(table.values())))
    lines = [f"| backend | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for title, cells in table.items():
        lines.append(f"| {title} | {' | '.join(cells[name].text for name in columns)} |")
    return "\n".join(lines)


def write_page(table: Mapping[str, Mapping[str, MatrixCell]], file: Path) -> None:
    before, _, rest = file.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    file.write_text(f"{before}{BEGIN}\n{markdown(table)}\n{END}{after}")


def run(work: Path, console: Console) -> dict[str, dict[str, MatrixCell]]:
    sources = backends.checkpoints(Path("checkpoints"))
    repository = work / "repository"
    backends.export(Path("checkpoints"), repository)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        backends.gateway(work, repository) as (gateway, rows),
        dialects(gateway.http, gateway.grpc) as found,
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
    ):
        task = progress.add_task("asking", total=len(rows))
        table = {}
        for row in rows:
            progress.update(task, description=row.title)
            table[row.title] = check_row(row, sources, found)
            progress.advance(task)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write the table between its markers"
    )
    options = parser.parse_args()
    console = Console(width=160)
    with tempfile.TemporaryDirectory() as work:
        table = run(Path(work), console)
    shown = Table("backend", *next(iter(table.values())), title="largest error against eager")
    for title, cells in table.items():
        shown.add_row(title, *(cell.text for cell in cells.values()))
    console.print(shown)
    wrong = [
        f"{title}, {name}: {problem}"
        for title, cells in table.items()
        for name, cell in cells.items()
        for problem in cell.wrong
    ]
    for line in wrong[:40]:
        print(line, file=sys.stderr)
    asked = sum(cell.requests for cells in table.values() for cell in cells.values())
    print(f"{asked} requests, {len(wrong)} wrong")
    if options.page and not wrong:
        write_page(table, options.page)
    return int(bool(wrong))


if __name__ == "__main__":
    verb.run(main)
