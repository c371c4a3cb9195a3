"""What became of an archive: as a table, as JSON, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from modelport.exporters.migration.handlers import Code
from modelport.gateway.cli.errors import UsageError

FORMAT = "modelport-migration/1"

#: Beside ``modelport.gateway.cli.errors.EXIT_CODES``: it is published, and something is left to do.
EXIT_NEEDS_A_PERSON = 6
#: Of several archives the first of these that any had.
SEVERITY = (1, 5, 4, 2, 3, EXIT_NEEDS_A_PERSON, 0)


class State(StrEnum):
    CARRIED = "carried over"
    NOTED = "noted"  # not carried over, and nothing is lost by it
    PERSON = "needs a person"


@dataclass(frozen=True, slots=True)
class Item:
    """One thing in an archive, and what became of it."""

    what: str
    state: State
    detail: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """One recorded request, sent to both servers.

    Attributes:
        statuses: of the old server and of the gateway; 0: no answer came.
        max_difference: the largest between two numbers; None: there was nothing to compare.
        problem: where the answers differ; empty: they agree.
    """

    request: str
    statuses: tuple[int, int]
    max_difference: float | None
    problem: str = ""


@dataclass(slots=True)
class Report:
    """Of one archive. ``error`` is empty where it became a version of the repository."""

    archive: str
    model: str = ""
    old_version: str = ""
    version: int | None = None
    format: str = ""
    items: list[Item] = field(default_factory=list)
    code: tuple[Code, ...] = ()
    comparisons: list[Comparison] = field(default_factory=list)
    error: str = ""
    error_code: int = 0

    def add(self, what: str, state: State, detail: str) -> None:
        self.items.append(Item(what, state, detail))

    @property
    def exit_code(self) -> int:
        """What the command ends with, were this the only archive."""
        if self.error_code:
            return self.error_code
        if any(comparison.problem for comparison in self.comparisons):
            return 3
        return EXIT_NEEDS_A_PERSON * any(item.state is State.PERSON for item in self.items)

    @property
    def outcome(self) -> str:
        if self.error:
            return self.error
        words = {0: "all carried over", 3: "published, answers differ"}
        return words.get(self.exit_code, "published, needs a person")


def exit_code(reports: Sequence[Report]) -> int:
    """The gravest of them."""
    codes = {report.exit_code for report in reports}
    return next((code for code in SEVERITY if code in codes), 0)


def write(reports: Sequence[Report], path: Path) -> None:
    """JSON, or Markdown where the name ends in ``.md``.

    Raises:
        UsageError: the file cannot be written.
    """
    text = markdown(reports) if path.suffix.lower() == ".md" else document(reports)
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"--report '{path}' cannot be written: {error.strerror}") from error


def document(reports: Sequence[Report]) -> str:
    """``{"format", "exit_code", "archives": [every attribute, "exit_code"]}``."""
    archives = [{**asdict(report), "exit_code": report.exit_code} for report in reports]
    whole: Mapping[str, Any] = {
        "format": FORMAT,
        "exit_code": exit_code(reports),
        "archives": archives,
    }
    return json.dumps(whole, indent=2) + "\n"


def markdown(reports: Sequence[Report]) -> str:
    lines = ["# Migration from TorchServe", ""]
    lines += _rows(("archive", "model", "version", "format", "outcome"), map(summary, reports))
    for report in reports:
        lines += ["", f"## {_cell(report.archive)}", ""]
        lines += _rows(("what", "state", "detail"), map(_item, report.items))
        if report.code:
            files = ((c.file, c.sha256, ", ".join(c.imports), defined(c)) for c in report.code)
            lines += ["", *_rows(("code, not run", "SHA-256", "imports", "defines"), files)]
        if report.comparisons:
            lines += [
                "",
                *_rows(("request", "old, new", "max difference", "verdict"), compared(report)),
            ]
    return "\n".join(lines) + "\n"


def summary(report: Report) -> tuple[str, ...]:
    """The row of an archive in a table of several."""
    version = "" if report.version is None else str(report.version)
    return report.archive, report.model, version, report.format, report.outcome


def _item(item: Item) -> tuple[str, ...]:
    return item.what, item.state.value, item.detail


def defined(code: Code) -> str:
    """What a file defines, or why nobody knows."""
    return code.problem or ", ".join(code.defines)


def compared(report: Report) -> list[tuple[str, ...]]:
    """The rows of a table of ``comparisons``."""
    return [
        (c.request, f"{c.statuses[0]}, {c.statuses[1]}", _difference(c), c.problem or "equal")
        for c in report.comparisons
    ]


def _difference(comparison: Comparison) -> str:
    found = comparison.max_difference
    return "no numbers" if found is None else f"{found:.2e}"


def _rows(head: Sequence[str], rows: Any) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(_cell, line))} |" for line in lines]


def _cell(text: object) -> str:
    """Names in an archive are anyone's: nothing in them is markup."""
    plain = " ".join(str(text).split())
    return "".join(f"\\{c}" if c in "\\|`*_[]<>#!" else c for c in plain)
