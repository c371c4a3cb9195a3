"""The report of a migration: as a table, as JSON, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from modelport.exporters.migration.handlers import HandlerCode
from modelport.exporters.runtime.file_errors import writing_to

FORMAT = "modelport-migration/1"

#: Exit code of a published version that needs a manual step; see ``ModelportError.exit_code``.
EXIT_NEEDS_A_PERSON = 6
#: Exit codes of several archives by precedence.
SEVERITY = (1, 5, 4, 2, 3, EXIT_NEEDS_A_PERSON, 0)


class MigrationState(StrEnum):
    """The fate of one part of an archive."""

    CARRIED = "carried over"
    NOTED = "noted"  # not carried over, without a loss
    PERSON = "needs a person"


@dataclass(frozen=True, slots=True)
class Item:
    """One part of an archive, and its fate."""

    what: str
    state: MigrationState
    detail: str


@dataclass(frozen=True, slots=True)
class ReplayComparison:
    """One recorded request, sent to both servers.

    Attributes:
        statuses: of the old server and of the gateway; 0: no answer came.
        max_difference: the largest difference of two numbers; None: there were none to compare.
        problem: the place where the answers differ; empty: they agree.
    """

    request: str
    statuses: tuple[int, int]
    max_difference: float | None
    problem: str = ""


@dataclass(slots=True)
class MigrationReport:
    """The report of one archive; ``error`` is empty if it became a published version."""

    archive: str
    model: str = ""
    old_version: str = ""
    version: int | None = None
    format: str = ""
    items: list[Item] = field(default_factory=list)
    code: tuple[HandlerCode, ...] = ()
    comparisons: list[ReplayComparison] = field(default_factory=list)
    error: str = ""
    error_code: int = 0

    def add(self, what: str, state: MigrationState, detail: str) -> None:
        self.items.append(Item(what, state, detail))

    @property
    def exit_code(self) -> int:
        """The command's exit code if this were the only archive."""
        if self.error_code:
            return self.error_code
        if any(comparison.problem for comparison in self.comparisons):
            return 3
        return EXIT_NEEDS_A_PERSON * any(item.state is MigrationState.PERSON for item in self.items)

    @property
    def outcome(self) -> str:
        if self.error:
            return self.error
        words = {0: "published, all carried over", 3: "published, answers differ"}
        return words.get(self.exit_code, "published, needs a person")


def exit_code(reports: Sequence[MigrationReport]) -> int:
    """The gravest exit code of the reports."""
    codes = {report.exit_code for report in reports}
    return next((code for code in SEVERITY if code in codes), 0)


def write(reports: Sequence[MigrationReport], path: Path) -> None:
    """Write the reports as Markdown if the file name ends in ``.md``, otherwise as JSON.

    Raises:
        UsageError: the file cannot be written.
    """
    text = markdown(reports) if path.suffix.lower() == ".md" else document(reports)
    with writing_to(path, "choose another --report"):
        path.write_text(text, encoding="utf-8", errors="backslashreplace")


def document(reports: Sequence[MigrationReport]) -> str:
    """``{"format", "exit_code", "archives": [every attribute, "exit_code"]}``."""
    archives = [{**asdict(report), "exit_code": report.exit_code} for report in reports]
    whole: Mapping[str, Any] = {
        "format": FORMAT,
        "exit_code": exit_code(reports),
        "archives": archives,
    }
    return json.dumps(whole, indent=2) + "\n"


def markdown(reports: Sequence[MigrationReport]) -> str:
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


def summary(report: MigrationReport) -> tuple[str, ...]:
    """The row of an archive in a table of several."""
    version = "" if report.version is None else str(report.version)
    return report.archive, report.model, version, report.format, report.outcome


def _item(item: Item) -> tuple[str, ...]:
    return item.what, item.state.value, item.detail


def defined(code: HandlerCode) -> str:
    """The definitions in a file, or the reason that they are unknown."""
    return code.problem or ", ".join(code.defines)


def compared(report: MigrationReport) -> list[tuple[str, ...]]:
    """The rows of a table of ``comparisons``."""
    return [
        (c.request, f"{c.statuses[0]}, {c.statuses[1]}", _difference(c), c.problem or "equal")
        for c in report.comparisons
    ]


def _difference(comparison: ReplayComparison) -> str:
    found = comparison.max_difference
    return "no numbers" if found is None else f"{found:.2e}"


def _rows(head: Sequence[str], rows: Any) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(_cell, line))} |" for line in lines]


def _cell(text: object) -> str:
    """Escape markup; names in an archive are untrusted."""
    plain = " ".join(str(text).split())
    return "".join(f"\\{c}" if c in "\\|`*_[]<>#!" else c for c in plain)
