"""Metrics that models declare, shown beside the gateway's own while their model is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from modelport.gateway.backends.python_worker.frames import FrameError
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.telemetry.model_metrics import FAMILIES, FamilyKind, MetricSeries

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,255}")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,255}")
#: Of one model.
MAX_FAMILIES, MAX_SERIES, MAX_BUCKETS, MAX_TEXT = 256, 4096, 256, 1024
_OPERATIONS: Mapping[str, FamilyKind | None] = {
    "declare": None, "increment": None, "set": FamilyKind.GAUGE,
    "observe": FamilyKind.HISTOGRAM, "count": FamilyKind.HISTOGRAM,
}  # fmt: skip


class ModelMetrics:
    """The metrics of one model version, which all its instances share."""

    def __init__(self) -> None:
        self._declared: dict[str, tuple[str, FamilyKind]] = {}
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], MetricSeries] = {}
        FAMILIES.owners.add(self)

    def declare(self, name: Any, description: Any, kind: Any) -> None:
        """Declare a family.

        Raises:
            InvalidArgument: the name is invalid, or used by a family of another kind.
        """
        if type(name) is not str or not _NAME.fullmatch(name) or FAMILIES.reserved(name):
            raise InvalidArgument("Invalid metric name")
        wanted = FamilyKind(kind)
        if any(o.kind_of(name) not in (None, wanted) for o in FAMILIES.owners):
            raise InvalidArgument("Family name already exists with different type")
        if name not in self._declared and len(self._declared) >= MAX_FAMILIES:
            raise InvalidArgument(f"a model has at most {MAX_FAMILIES} families of metrics")
        self._declared.setdefault(name, (str(description)[:MAX_TEXT], wanted))

    def update(self, rows: Any) -> None:
        """Apply changes; raises ``FrameError`` if they are none."""
        try:
            for family, labels, operation, value in rows:
                self._apply(family, tuple((str(k), str(v)) for k, v in labels), operation, value)
        except (TypeError, ValueError, LookupError) as error:
            raise FrameError("a change of a metric is described wrongly") from error

    def _apply(
        self, family: str, labels: tuple[tuple[str, str], ...], operation: str, value: float
    ) -> None:
        _, kind = self._declared[family]
        word, _, argument = operation.partition(" ")
        if _OPERATIONS[word] not in (None, kind) or not math.isfinite(value):
            raise ValueError(operation)
        series = self._series.get((family, labels))
        if series is None:
            if len(self._series) >= MAX_SERIES:
                return  # the others stay right
            if any(not _LABEL.fullmatch(key) or len(text) > MAX_TEXT for key, text in labels):
                raise ValueError(labels)
            series = self._series[family, labels] = MetricSeries()
        if word == "declare":
            if kind is FamilyKind.HISTOGRAM and not series.counts:
                bounds = tuple(map(float, filter(None, argument.split(","))))
                if len(bounds) > MAX_BUCKETS:
                    raise ValueError("buckets")
                series.buckets, series.counts = bounds, [0] * (len(bounds) + 1)
        elif word == "set":
            series.value = float(value)
        elif word == "increment":
            if kind is FamilyKind.COUNTER and value < 0:
                raise ValueError(value)
            series.value += value
        elif word == "observe":
            series.value += value
        else:
            series.counts[int(argument)] += int(value)

    def value(self, family: str, labels: Mapping[str, str]) -> float:
        """The value of a series; 0 if nothing has changed it."""
        series = self._series.get((family, tuple(sorted(labels.items()))))
        return 0.0 if series is None else series.value

    def kind_of(self, name: str) -> FamilyKind | None:
        declared = self._declared.get(name)
        return None if declared is None else declared[1]

    def families(self) -> Iterator[tuple[str, str, FamilyKind]]:
        """Name, description and kind of every family."""
        for name, (description, kind) in self._declared.items():
            yield name, description, kind

    def series(self, family: str) -> Iterable[tuple[tuple[tuple[str, str], ...], MetricSeries]]:
        """Labels and values of the series of ``family``."""
        return [(labels, s) for (name, labels), s in self._series.items() if name == family]

    def close(self) -> None:
        """Remove the metrics, with the model."""
        FAMILIES.owners.discard(self)
