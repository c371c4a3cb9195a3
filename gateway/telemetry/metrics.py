"""Prometheus metrics of one process, read from its counters at scrape time.

Model metrics have the names that dashboards of Triton, TensorFlow Serving and TorchServe use. The
gateway's own have names with ``modelport_``; each value can be summed over workers.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    Sample,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from modelport.gateway.runtime.request_memory import RequestMemory
from modelport.gateway.settings import MetricsChoice
from modelport.gateway.telemetry.model_metrics import FAMILIES
from modelport.gateway.telemetry.statistics import (
    PHASE_BUCKETS_US,
    PHASES,
    Statistics,
    TraceExemplar,
)
from modelport.gateway.telemetry.summaries import CACHE_SUMMARIES, SUMMARIES
from modelport.gateway.telemetry.tfserving_counters import REQUEST_BUCKETS_US, TfServingRequests

#: The states of the repository index.
STATES = ("READY", "LOADING", "UNLOADING", "UNAVAILABLE")
#: The only metric with a name of the gateway's own that is read from the counters of a version.
IN_FLIGHT = "modelport_requests_in_flight"
#: Name, version and counters of every served version, read at scrape time.
StatisticsSource = Callable[[], Iterable[tuple[str, int, Statistics]]]

#: Metric, description, and attribute of ``Statistics``; nanoseconds are shown as microseconds.
_COUNTERS = (
    ("nv_inference_request_success", "Successful requests", "success.count"),
    ("nv_inference_count", "Inferences, batch elements counted singly", "inference_count"),
    ("nv_inference_exec_count", "Model executions", "execution_count"),
    ("nv_inference_request_duration_us", "Cumulative request duration", "success.ns"),
    ("nv_inference_queue_duration_us", "Cumulative queue duration", "queue.ns"),
    ("nv_inference_compute_input_duration_us", "Cumulative input preparation", "compute_input.ns"),
    ("nv_inference_compute_infer_duration_us", "Cumulative model execution", "compute_infer.ns"),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative output preparation",
        "compute_output.ns",
    ),
)
#: For versions with a response cache.
_CACHE_COUNTERS = (
    ("nv_cache_num_hits_per_model", "Cache hits", "cache_hit.count"),
    ("nv_cache_num_misses_per_model", "Cache misses", "cache_miss.count"),
    (
        "nv_cache_hit_duration_per_model",
        "Cumulative look-ups of cache hits, in microseconds",
        "cache_hit.ns",
    ),
    (
        "nv_cache_miss_duration_per_model",
        "Cumulative look-ups and insertions of cache misses, in microseconds",
        "cache_miss.ns",
    ),
)


def triton_families(source: StatisticsSource, chosen: MetricsChoice) -> Iterator[Metric]:
    """The metrics with Triton's names, of those ``chosen``."""
    rows = [((name, str(version)), stats) for name, version, stats in source()]
    spaces = {key: stats.namespace for key, stats in rows if stats.namespace}
    for family in _triton_families(rows, chosen):
        if spaces:
            family.samples = [_in_namespace(sample, spaces) for sample in family.samples]
        yield family


def _in_namespace(sample: Sample, spaces: Mapping[tuple[str, str], str]) -> Sample:
    """Add the label ``namespace`` to a sample of a model that has one."""
    namespace = spaces.get((sample.labels["model"], sample.labels["version"]))
    return (
        sample._replace(labels={**sample.labels, "namespace": namespace}) if namespace else sample
    )


def _triton_families(
    rows: Sequence[tuple[tuple[str, str], Statistics]], chosen: MetricsChoice
) -> Iterator[Metric]:
    labels = ("model", "version")
    cached = [(key, statistics) for key, statistics in rows if statistics.cached]
    for counters, counted in ((_COUNTERS, rows), (_CACHE_COUNTERS, cached)):
        if counters is _CACHE_COUNTERS and not cached:
            continue
        for metric, text, attribute in counters:
            if attribute.endswith(".ns") and not chosen.counter_latencies:
                continue
            counter = PlainCounter(metric, text, labels=labels)
            for key, statistics in counted:
                value = attrgetter(attribute)(statistics)
                counter.add_metric(key, value // (1000 if attribute.endswith(".ns") else 1))
            yield counter
    failures = PlainCounter(
        "nv_inference_request_failure", "Failed requests", labels=(*labels, "reason")
    )
    pending = GaugeMetricFamily(
        "nv_inference_pending_request_count", "Requests awaiting execution", labels=labels
    )
    in_flight = GaugeMetricFamily(IN_FLIGHT, "Requests awaiting an answer", labels=labels)
    histogram = HistogramMetricFamily(
        "nv_inference_first_response_histogram_ms", "Time to first response", labels=labels
    )
    for key, statistics in rows:
        for reason, count in statistics.failures.items():
            failures.add_metric((*key, reason), count)
        pending.add_metric(key, statistics.queued)
        in_flight.add_metric(key, statistics.pending)
        rows_by_bound = _cumulative(statistics.buckets_ms, statistics.first_response)
        histogram.add_metric(key, rows_by_bound, statistics.first_response_ns // 1_000_000)
    yield failures
    yield pending
    yield in_flight
    if chosen.histogram_latencies:
        yield histogram
        # Who turns the counters off finds nothing whose name begins with theirs, as in Triton.
        if chosen.counter_latencies:
            yield from _histograms(rows)
    if chosen.summary_latencies:
        yield from _summaries(rows, SUMMARIES, chosen.summary_quantiles)
        yield from _summaries(cached, CACHE_SUMMARIES, chosen.summary_quantiles)


def _histograms(rows: Sequence[tuple[tuple[str, str], Statistics]]) -> Iterator[Metric]:
    """The histograms of whole requests and of their phases."""
    for phase in PHASES:
        histogram = HistogramMetricFamily(
            f"nv_inference_{phase}_duration_histogram_us",
            f"Requests by their {phase.replace('_', ' ')} duration",
            labels=("model", "version"),
        )
        for key, statistics in rows:
            counts: list[Any] = [*_cumulative(PHASE_BUCKETS_US, statistics.phases[phase])]
            for (kept, bucket), found in statistics.exemplars.items():
                if kept == phase:
                    counts[bucket] = (*counts[bucket], _exemplar(found))
            total = statistics.success if phase == "request" else getattr(statistics, phase)
            histogram.add_metric(key, counts, total.ns / 1000)
        yield histogram


def _exemplar(found: TraceExemplar) -> Exemplar:
    return Exemplar({"trace_id": found.trace_id, "span_id": found.span_id}, found.us, found.at)


def _summaries(
    rows: Sequence[tuple[tuple[str, str], Statistics]],
    metrics: Mapping[str, str],
    quantiles: Sequence[float],
) -> Iterator[Metric]:
    """Triton's summaries; a version with a cache has none of whole requests, as in Triton."""
    for metric, text in metrics.items():
        summary = Metric(f"{metric}_us", f"{text}, in microseconds", "summary")
        for (model, version), statistics in rows:
            if statistics.summaries is None or (
                statistics.cached and metric == "nv_inference_request_summary"
            ):
                continue
            found, labels = (
                statistics.summaries.by_metric[metric],
                (("model", model), ("version", version)),
            )
            for quantile, value in zip(quantiles, found.quantiles(quantiles), strict=True):
                summary.add_sample(
                    summary.name, dict((*labels, ("quantile", f"{quantile:g}"))), value
                )
            summary.add_sample(f"{summary.name}_count", dict(labels), found.count)
            summary.add_sample(f"{summary.name}_sum", dict(labels), found.total_ns / 1000)
        if summary.samples:
            yield summary


def torchserve_families(source: StatisticsSource) -> Iterator[Metric]:
    """The same counters with TorchServe's names."""
    labels, host = ("model_name", "model_version", "hostname"), socket.gethostname()
    requests = CounterMetricFamily(
        "ts_inference_requests", "Total number of inference requests.", labels=labels
    )
    latency = PlainCounter(
        "ts_inference_latency_microseconds", "Total inference latency", labels=labels
    )
    queue = PlainCounter("ts_queue_latency_microseconds", "Total queue latency", labels=labels)
    for name, version, statistics in source():
        key = (name, str(version), host)
        requests.add_metric(key, statistics.success.count + statistics.fail.count)
        latency.add_metric(key, statistics.success.ns / 1000)
        queue.add_metric(key, statistics.queue.ns / 1000)
    yield from (requests, latency, queue)
    yield from _by_status(source, host)


def _by_status(source: StatisticsSource, host: str) -> Iterator[Metric]:
    """Inference requests of every dialect, by class of status."""
    counts = dict.fromkeys(("2XX", "4XX", "5XX"), 0)
    for _, _, statistics in source():
        failures = statistics.failures
        counts["2XX"] += statistics.success.count
        counts["4XX"] += failures["OTHER"]
        counts["5XX"] += failures["REJECTED"] + failures["BACKEND"]
    for status, count in counts.items():
        counter = PlainCounter(
            f"Requests{status}",
            f"Total number of requests with response in the {status} range.",
            labels=("Level", "Hostname"),
        )
        counter.add_metric(("Host", host), count)
        yield counter


def tfserving_families(counters: TfServingRequests) -> Iterator[Metric]:
    """The counters with TensorFlow Serving's names."""
    requests = PlainCounter(
        ":tensorflow:serving:request_count",
        "The total number of requests.",
        labels=("model_name", "status"),
    )
    for key, count in counters.counts.items():
        requests.add_metric(key, count)
    latency = HistogramMetricFamily(
        ":tensorflow:serving:request_latency",
        "Distribution of wall time (in microseconds) for Tensorflow Serving request.",
        labels=("model_name", "API", "entrypoint"),
    )
    for labels, (buckets, total) in counters.latencies.items():
        rows = _cumulative(REQUEST_BUCKETS_US, buckets)
        latency.add_metric(labels, rows, total.ns / 1000)
    yield from (requests, latency)


def memory_families(memory: RequestMemory) -> Iterator[Metric]:
    """The memory held by requests, and the requests refused for lack of memory."""
    yield GaugeMetricFamily(
        "modelport_request_memory_used_bytes", "Memory that requests use", memory.used_bytes
    )
    yield GaugeMetricFamily(
        "modelport_request_memory_limit_bytes",
        "Memory limit of all requests together",
        memory.limit_bytes,
    )
    yield CounterMetricFamily(
        "modelport_request_memory_refused",
        "Requests refused for lack of memory",
        memory.refused,
    )


class Conditions(Protocol):
    """The health of a gateway, queried at every scrape."""

    @property
    def ready(self) -> bool:
        """Whether the gateway is ready for traffic."""

    def model_states(self) -> Iterable[tuple[str, str]]:
        """Model and state of every wanted version."""

    def load_failures(self) -> Mapping[str, int]:
        """Failed loads of versions and configurations, by model."""

    def endpoints(self) -> Iterable[tuple[str, str, str, bool]]:
        """Model, version, ``host:port``, and whether the endpoint is ejected."""


def condition_families(conditions: Conditions) -> Iterator[Metric]:
    """The health of one process."""
    yield _workers(conditions)
    yield _versions(conditions)
    failures = CounterMetricFamily(
        "modelport_model_load_failures",
        "Failed loads of a version or of a model's configuration",
        labels=("model",),
    )
    for model, count in conditions.load_failures().items():
        failures.add_metric((model,), count)
    yield failures
    ejected = GaugeMetricFamily(
        "modelport_upstream_endpoint_ejected",
        "Workers that have ejected the endpoint after failures",
        labels=("model", "version", "endpoint"),
    )
    for model, version, endpoint, is_ejected in conditions.endpoints():
        ejected.add_metric((model, version, endpoint), is_ejected)
    yield ejected


def _workers(conditions: Conditions) -> Metric:
    workers = GaugeMetricFamily(
        "modelport_workers",
        "Workers that are ready for traffic, and those that are not",
        labels=("state",),
    )
    workers.add_metric(("ready",), conditions.ready)
    workers.add_metric(("not_ready",), not conditions.ready)
    return workers


def _versions(conditions: Conditions) -> Metric:
    versions = GaugeMetricFamily(
        "modelport_model_versions",
        "Versions in each state of the repository index, of all workers",
        labels=("model", "state"),
    )
    counts: dict[str, dict[str, int]] = {}
    for model, state in conditions.model_states():
        counts.setdefault(model, dict.fromkeys(STATES, 0))[state] += 1
    for model, states in counts.items():
        for state, count in states.items():
            versions.add_metric((model, state), count)
    return versions


class FamiliesCollector(Collector):
    """Collects the metric families that a function returns, at every scrape."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()


class PlainCounter(CounterMetricFamily):
    """A counter whose samples have the family's own name, without ``_total``.

    ``admin.metrics_port`` removes the suffix from the family's name in the text.
    """

    def add_metric(self, labels: Any, value: float, *_: Any, **__: Any) -> None:
        self.add_sample(self.name, dict(zip(self._labelnames, labels, strict=True)), value)


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    texts = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    totals = map(float, itertools.accumulate(counts))
    return list(zip(texts, totals, strict=True))


def registry(
    statistics: StatisticsSource,
    requests: TfServingRequests,
    conditions: Conditions,
    memory: RequestMemory,
    process: bool,
    chosen: MetricsChoice,
) -> CollectorRegistry:
    """All metrics of a process. ``process``: include the operating system's figures."""
    made = CollectorRegistry()
    for families in (
        partial(triton_families, statistics, chosen),
        partial(torchserve_families, statistics),
        partial(tfserving_families, requests),
        partial(condition_families, conditions),
        partial(memory_families, memory),
        FAMILIES.collect,
    ):
        made.register(FamiliesCollector(families))
    if process:
        ProcessCollector(registry=made)
    return made
