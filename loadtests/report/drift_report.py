"""Reports of drift: a table for people, and a document for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest, write_to_textfile

from modelport.loadtests import marked_block
from modelport.loadtests.drift.shift import Drift, FeatureShift
from modelport.loadtests.report import html
from modelport.loadtests.report.comparison_tables import Table, TableRow

#: Values of the label of metrics about one side of the comparison.
SIDES = ("baseline", "records")
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


def write_metrics(drift: Drift, path: Path, model: str) -> None:
    """Write the report as Prometheus's text, in place of an earlier one at once.

    It is for the textfile collector of node_exporter, or a Pushgateway.
    """
    registry = CollectorRegistry()

    def gauge(name: str, text: str, *labels: str) -> Gauge:
        names = ("model", *labels)
        return Gauge(f"modelport_drift_{name}", text, names, registry=registry)

    feature = ("side", "feature")
    drifted = gauge("feature_drifted", "Whether the feature has drifted", *feature)
    psi = gauge("population_stability_index", "Size of the shift", *feature)
    p_value = gauge("p_value", "p-value of the shift, corrected", *feature)
    new = gauge("new_categories_ratio", "Share of rows with new categories", *feature)
    missing = gauge("missing_values_ratio", "Share of missing values", *feature, "rows")
    rows = gauge("rows", "Rows that were compared", *feature, "rows")
    for each in drift.shifts:
        labels = (model, *each.feature)
        drifted.labels(*labels).set(bool(each.reasons))
        psi.labels(*labels).set(each.psi)
        p_value.labels(*labels).set(each.p_value)
        new.labels(*labels).set(each.new_share)
        for side, share, count in zip(SIDES, each.missing, each.rows, strict=True):
            missing.labels(*labels, side).set(share)
            rows.labels(*labels, side).set(count)
    gauge("features", "Features that were compared").labels(model).set(len(drift.shifts))
    gauge("drifted_features", "Features that have drifted").labels(model).set(len(drift.drifted))
    gauge("threshold", "Size of a shift that counts").labels(model).set(drift.threshold)
    ended = gauge("last_run_timestamp_seconds", "Time of the comparison")
    ended.labels(model).set_to_current_time()
    if path.exists() and not path.is_file():  # a pipe, or /dev/stdout
        path.write_bytes(generate_latest(registry))
    else:
        write_to_textfile(str(path), registry)


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
