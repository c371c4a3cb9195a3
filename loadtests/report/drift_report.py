"""Reports of drift: a table for people, and a document for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelport.loadtests import marked_block
from modelport.loadtests.drift.shift import Drift, FeatureShift
from modelport.loadtests.report import html
from modelport.loadtests.report.comparison_tables import Table, TableRow

HEAD = ("kind", "rows", "PSI", "statistic", "p", "mean", "missing", "drift")


def table(shifts: Sequence[FeatureShift], caption: str) -> Table:
    rows = tuple(
        TableRow(f"{each.feature.side} {each.feature.name}", _cells(each)) for each in shifts
    )
    return Table(caption, HEAD, rows, "feature")


def _cells(each: FeatureShift) -> tuple[str, ...]:
    means = "" if each.means is None else f"{each.means[0]:.4g} → {each.means[1]:.4g}"
    missing = f"{each.missing[0]:.1%} → {each.missing[1]:.1%}" if any(each.missing) else ""
    why = ", ".join(each.reasons)
    if each.new:
        why += f" ({each.new_share:.1%} new: {', '.join(each.new)})"
    rows = f"{each.rows[0]} → {each.rows[1]}"
    return (
        each.kind, rows, f"{each.psi:.3f}", f"{each.statistic:.3f}", f"{each.p_value:.2g}", means,
        missing, why.strip(),
    )  # fmt: skip


def document(drift: Drift) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "drifted": len(drift.drifted),
        "features": len(drift.shifts),
        "alpha": drift.alpha,
        "threshold": drift.threshold,
        "correction": str(drift.correction),
        "notes": list(drift.notes),
        "shifts": [
            dataclasses.asdict(each) | {"feature": each.feature._asdict()} for each in drift.shifts
        ],
    }


def write(drift: Drift, path: Path, facts: Sequence[tuple[str, str]]) -> None:
    """Write the report as one HTML page."""
    page = html.render(
        "drift.html.j2",
        drift=drift,
        drifted=table(drift.drifted, "Features that have drifted"),
        others=table([e for e in drift.shifts if not e.reasons], "Other features"),
        facts=facts,
    )
    marked_block.write(path, page)
