"""Merge the answers of all workers into one; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.samples import Exemplar

Row = dict[str, str]
#: The member that identifies a row of a list in a statistics document.
_KEY = "batch_size"
#: Members that are merged by maximum instead of sum.
_LATEST = frozenset({"last_inference", _KEY})
#: If workers disagree about a version, the state of the lowest rank is reported. Others have 0.
_RANKS = {"UNAVAILABLE": 0, "LOADING": 1, "UNLOADING": 2, "READY": 3}
_UNLOADED = ("UNAVAILABLE", "unloaded")
#: Metric types whose values end with the worker that reported them.
_MOMENTARY = frozenset({"gauge", "info", "stateset"})


# -- the repository index --------------------------------------------------------------------------


def index(answers: Sequence[Sequence[Row]]) -> list[Row]:
    """Merge repository indexes; a version is READY if it is READY in every worker."""
    found: dict[tuple[str, str], list[Row]] = {}
    for rows in answers:
        for row in rows:
            found.setdefault((row["name"], row.get("version", "")), []).append(row)
    known = {name for name, version in found if version}
    merged = [
        _row(rows, len(answers))
        for (name, version), rows in found.items()
        if version or name not in known  # a model without versions, where one worker has some
    ]
    return sorted(merged, key=lambda row: (row["name"], int(row.get("version") or 0)))


def _row(rows: list[Row], workers: int) -> Row:
    states = {(row.get("state", ""), row.get("reason", "")) for row in rows}
    if len(states) == 1 and len(rows) == workers:
        return rows[0]
    if len(states) > 1 and any(state == "UNLOADING" for state, _ in states):
        rows = [row for row in rows if (row.get("state"), row.get("reason")) != _UNLOADED]
    worst = min(rows, key=lambda row: _RANKS.get(row.get("state", ""), 0))
    if worst.get("state") == "READY":
        if len(rows) == workers:  # READY everywhere, with a reason somewhere
            return next(row for row in rows if row.get("reason"))
        return {**worst, "state": "LOADING", "reason": ""}  # some workers do not list it yet
    alike = sum(row.get("state") == worst.get("state") for row in rows)
    reason = worst.get("reason", "")
    if reason and alike < workers:
        reason = f"{reason} (in {alike} of {workers} workers)"
    return {**worst, **({"reason": reason} if "reason" in worst else {})}


def silent(rows: Sequence[Row], reason: str) -> list[Row]:
    """Return the last index of a worker that does not respond, without READY versions."""
    return [
        {**row, "state": "UNAVAILABLE", "reason": reason} if row.get("state") == "READY" else row
        for row in rows
    ]


# -- statistics ------------------------------------------------------------------------------------


def documents(answers: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Sum the entries of ``model_stats`` by model and version."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for entries in answers:
        for entry in entries:
            key = (entry["name"], int(entry["version"]))
            found[key] = _add(found[key], entry) if key in found else dict(entry)
    return [found[key] for key in sorted(found)]


def _add(one: Any, other: Any, name: str = "") -> Any:
    if isinstance(one, dict):
        both = one.keys() & other.keys()
        return {**one, **other, **{key: _add(one[key], other[key], key) for key in both}}
    if isinstance(one, list):
        rows = {row[_KEY]: row for row in one}
        for row in other:
            size = row[_KEY]
            rows[size] = _add(rows[size], row) if size in rows else row
        return [rows[size] for size in sorted(rows)]
    if isinstance(one, (int, float)) and not isinstance(one, bool):
        return max(one, other) if name in _LATEST else one + other
    return one


# -- metrics ---------------------------------------------------------------------------------------

#: Name, documentation, type, and samples of name, labels, value and, if it has one, exemplar.
Family = list[Any]


def families_json(metrics: Iterable[Metric]) -> list[Family]:
    """Convert metric families to JSON values."""
    return [
        [
            family.name,
            family.documentation,
            family.type,
            [
                [s.name, s.labels, s.value, *([[*s.exemplar]] if s.exemplar else ())]
                for s in family.samples
            ],
        ]
        for family in metrics
    ]


def families(answers: Iterable[Sequence[Family]]) -> list[Family]:
    """Sum the samples of the same name and labels."""
    found: dict[str, tuple[Family, dict[Any, list[Any]]]] = {}
    for each in answers:
        for name, text, kind, samples in each:
            _, rows = found.setdefault(name, ([name, text, kind], {}))
            for sample, labels, value, *exemplar in samples:
                key = (sample, tuple(sorted(labels.items())))
                row = rows.setdefault(key, [sample, labels, 0])
                row[2] += value
                if exemplar and (len(row) == 3 or row[3][2] < exemplar[0][2]):  # the latest
                    row[3:] = exemplar
    return [[*head, list(rows.values())] for head, rows in found.values()]


def lasting(answers: Sequence[Family]) -> list[Family]:
    """Keep the families that still count after their worker has ended."""
    return [family for family in answers if family[2] not in _MOMENTARY]


def metrics(merged: Iterable[Family]) -> Iterator[Metric]:
    """Convert JSON values back to metric families."""
    for name, text, kind, samples in merged:
        metric = Metric(name, text, kind)
        for sample, labels, value, *exemplar in samples:
            found = Exemplar(*exemplar[0]) if exemplar else None
            metric.add_sample(sample, labels, value, exemplar=found)
        yield metric
