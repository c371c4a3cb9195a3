"""Texts and tables of a rollout, from its status as the gateway's API has it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from modelport.loadtests import number_format
from modelport.loadtests.report.comparison_tables import Table, TableRow

Document = Mapping[str, Any]

#: Most characters of an example.
MAX_EXAMPLE = 4000
#: E-values from this power of ten on are shown as such.
LARGE_POWER = 5
TONES = {"promoted": "pass", "rolled back": "fail"}


def side(state: Document, name: str) -> str:
    """A side as ``model/version``."""
    found = state["plan"][name]
    return f"{found['model']}/{found['version']}"


def tone(state: Document) -> str:
    """The class of the verdict, by the gate's words."""
    return TONES.get(state["phase"], "inconclusive")


def reason(state: Document) -> str:
    """The reason of the verdict, or of the latest decision."""
    decision = state.get("decision")
    return str(decision["reason"] if decision else state["events"][-1]["reason"])


def stages(state: Document) -> Table:
    """Counts by stage."""
    counts, rows = state["counts"], []
    for number, (stage, found) in enumerate(zip(_stages(state), counts, strict=False), start=1):
        figures = [found[name][key] for name in ("baseline", "candidate")
                   for key in ("requests", "errors")]  # fmt: skip
        figures += [found[key] for key in ("compared", "disagreed", "invalid", "failed", "dropped")]
        rows.append(TableRow(f"{number}: {stage}", tuple(f"{figure:,}" for figure in figures)))
    head = (
        "baseline's requests", "errors", "candidate's requests", "errors", "compared", "disagreed",
        "invalid", "copies failed", "copies dropped",
    )  # fmt: skip
    return Table("Counts by stage", head, tuple(rows), "stage")


def _stages(state: Document) -> list[str]:
    plan = state["plan"]
    shadow = [f"shadow {100 * plan['shadow']:.4g} %"] if plan["shadow"] else []
    return [*shadow, *(f"canary {100 * share:.4g} %" for share in plan["steps"])]


def criteria(state: Document) -> Table:
    """The evidence about each criterion."""
    rows = []
    for row in state["evidence"]:
        figures = [_figure(row[key]) for key in ("limit", "estimate", "lower", "upper")]
        bound = number_format.figure(1 / row["alpha"])
        evidence = f"{_e_value(row['log_e_value'])} of {bound}"
        count = f"{row['events']:,} of {row['trials']:,}"
        rows.append(TableRow(row["name"], (row["status"], *figures, evidence, count)))
    head = ("state", "limit", "estimate", "lower bound", "upper bound", "e-value", "events")
    return Table("Evidence", head, tuple(rows), "criterion")


def _e_value(logarithm: float) -> str:
    """An e-value; a large one as a power of ten."""
    power = logarithm / math.log(10)
    return number_format.figure(10**power) if power < LARGE_POWER else f"10^{power:.0f}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def events(state: Document) -> Table:
    """All changes of the rollout."""
    rows = [
        TableRow(
            time(event), (event["kind"], str(event["stage"] + 1), event["reason"], event["by"])
        )
        for event in state["events"]
    ]
    return Table("Events", ("change", "stage", "reason", "by"), tuple(rows), "time")


def time(event: Document) -> str:
    """The time of an event, in UTC."""
    return f"{datetime.fromtimestamp(event['time'], UTC):%Y-%m-%d %H:%M:%S} UTC"


def examples(found: Sequence[Document]) -> list[tuple[str, str]]:
    """The titles and texts of disagreeing requests."""
    texts = []
    for number, example in enumerate(found, start=1):
        title = f"{number}: stage {example['stage'] + 1}, request {example.get('id') or '-'}"
        text = json.dumps(example, ensure_ascii=False)
        texts.append((title, text if len(text) <= MAX_EXAMPLE else text[:MAX_EXAMPLE] + " …"))
    return texts
