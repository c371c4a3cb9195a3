"""Metrics of models' own, by the models that declare them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Protocol

from prometheus_client.core import Metric

#: Prefixes of the gateway's own names.
_OWN = ("nv_", "ts_", "modelport_", "process_", "Requests", ":tensorflow:")
Labels = tuple[tuple[str, str], ...]


class FamilyKind(StrEnum):
    """Kinds of families, with Triton's names."""

    COUNTER = "COUNTER"
    GAUGE = "GAUGE"
    HISTOGRAM = "HISTOGRAM"


class MetricSeries:
    """A value, or the sum and the counts of a histogram's buckets."""

    __slots__ = ("buckets", "counts", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.buckets: tuple[float, ...] = ()
        self.counts: list[int] = []


class MetricsOwner(Protocol):
    """A model that has metrics of its own."""

    def kind_of(self, name: str) -> FamilyKind | None: ...

    def families(self) -> Iterator[tuple[str, str, FamilyKind]]: ...

    def series(self, family: str) -> Iterable[tuple[Labels, MetricSeries]]: ...


class ModelFamilies:
    """The owners of this process. Only the event loop changes them."""

    def __init__(self) -> None:
        self.owners: set[MetricsOwner] = set()

    def reserved(self, name: str) -> bool:
        """Whether ``name`` may be one of the gateway's."""
        return name.startswith(_OWN)

    def collect(self) -> Iterator[Metric]:
        """The families of all models; of several owners, the series of equal labels are added."""
        names: dict[str, tuple[str, FamilyKind]] = {}
        for owner in self.owners:
            for name, description, kind in owner.families():
                names.setdefault(name, (description, kind))
        for name, (description, kind) in sorted(names.items()):
            family = Metric(name, description or name, kind.value.lower())
            values: dict[tuple[str, Labels], float] = {}
            for owner in self.owners:
                for labels, series in owner.series(name):
                    for suffix, extra, value in _samples(kind, series):
                        key = suffix, (*labels, *extra)
                        values[key] = values.get(key, 0.0) + value
            for (suffix, all_labels), value in values.items():
                family.add_sample(name + suffix, dict(all_labels), value)
            yield family


def _samples(kind: FamilyKind, series: MetricSeries) -> Iterator[tuple[str, Labels, float]]:
    if kind is not FamilyKind.HISTOGRAM:
        yield "", (), series.value
        return
    bounds = [*(f"{bound:g}" for bound in series.buckets), "+Inf"]
    for bound, count in zip(bounds, itertools.accumulate(series.counts), strict=False):
        yield "_bucket", (("le", bound),), float(count)
    yield "_count", (), float(sum(series.counts))
    yield "_sum", (), series.value


FAMILIES = ModelFamilies()
