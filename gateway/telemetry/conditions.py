"""How the gateway itself is, as Prometheus metrics: Triton has no names for what alerts are about.

Every value is one that may be added up: of several workers the metrics port tells the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

#: The states of the repository index.
STATES = ("READY", "LOADING", "UNLOADING", "UNAVAILABLE")


class Conditions(Protocol):
    """What is asked at every scrape."""

    @property
    def ready(self) -> bool:
        """Whether traffic should come."""

    def model_states(self) -> Iterable[tuple[str, str]]:
        """Model and state of every version that is wanted here."""

    def load_failures(self) -> Mapping[str, int]:
        """By model: how often a version, or the model's configuration, could not be loaded."""

    def endpoints(self) -> Iterable[tuple[str, str, str, bool]]:
        """Model, version, ``host:port``, and whether it is ejected."""


class ConditionsCollector(Collector):
    """Families of one process."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions

    def collect(self) -> Iterator[Metric]:
        yield self._workers()
        yield self._versions()
        failures = CounterMetricFamily(
            "modelport_model_load_failures",
            "Loads of a version, or of a model's configuration, that failed",
            labels=("model",),
        )
        for model, count in self._conditions.load_failures().items():
            failures.add_metric((model,), count)
        yield failures
        ejected = GaugeMetricFamily(
            "modelport_upstream_endpoint_ejected",
            "Workers that send an endpoint nothing, because it failed",
            labels=("model", "version", "endpoint"),
        )
        for model, version, endpoint, is_ejected in self._conditions.endpoints():
            ejected.add_metric((model, version, endpoint), is_ejected)
        yield ejected

    def _workers(self) -> Metric:
        workers = GaugeMetricFamily(
            "modelport_workers",
            "Workers that are ready for traffic, and that are not",
            labels=("state",),
        )
        workers.add_metric(("ready",), self._conditions.ready)
        workers.add_metric(("not_ready",), not self._conditions.ready)
        return workers

    def _versions(self) -> Metric:
        versions = GaugeMetricFamily(
            "modelport_model_versions",
            "Versions in each state of the repository index, of all workers",
            labels=("model", "state"),
        )
        counts: dict[str, dict[str, int]] = {}
        for model, state in self._conditions.model_states():
            counts.setdefault(model, dict.fromkeys(STATES, 0))[state] += 1
        for model, states in counts.items():
            for state, count in states.items():
                versions.add_metric((model, state), count)
        return versions
