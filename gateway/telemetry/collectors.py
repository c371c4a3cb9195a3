"""Prometheus metrics, read from the statistics at scrape time.

They have the names that dashboards of Triton, TensorFlow Serving and TorchServe use.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from modelport.gateway.telemetry.statistics import FIRST_RESPONSE_BUCKETS_MS, Statistics
from modelport.gateway.telemetry.tfserving import REQUEST_BUCKETS_US, TfServingRequests

#: name, version and counters of everything that has been served, read at scrape time.
StatisticsSource = Callable[[], Iterable[tuple[str, int, Statistics]]]

_COUNTERS: tuple[tuple[str, str, Callable[[Statistics], float]], ...] = (
    ("nv_inference_request_success", "Successful requests", lambda s: s.success.count),
    (
        "nv_inference_count",
        "Inferences, batch elements counted singly",
        lambda s: s.inference_count,
    ),
    ("nv_inference_exec_count", "Model executions", lambda s: s.execution_count),
    (
        "nv_inference_request_duration_us",
        "Cumulative request duration",
        lambda s: s.success.ns // 1000,
    ),
    ("nv_inference_queue_duration_us", "Cumulative queue duration", lambda s: s.queue.ns // 1000),
    (
        "nv_inference_compute_input_duration_us",
        "Cumulative input preparation",
        lambda s: s.compute_input.ns // 1000,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative model execution",
        lambda s: s.compute_infer.ns // 1000,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative output preparation",
        lambda s: s.compute_output.ns // 1000,
    ),
)


#: Of versions that are served from a response cache.
_CACHE_COUNTERS: tuple[tuple[str, str, Callable[[Statistics], float]], ...] = (
    ("nv_cache_num_hits_per_model", "Cache hits", lambda s: s.cache_hit.count),
    ("nv_cache_num_misses_per_model", "Cache misses", lambda s: s.cache_miss.count),
    (
        "nv_cache_hit_duration_per_model",
        "Cumulative look-ups of cache hits, in microseconds",
        lambda s: s.cache_hit.ns // 1000,
    ),
    (
        "nv_cache_miss_duration_per_model",
        "Cumulative look-ups and insertions of cache misses, in microseconds",
        lambda s: s.cache_miss.ns // 1000,
    ),
)


class TritonCollector(Collector):
    """Prometheus families with the names that dashboards for Triton already use."""

    def __init__(self, source: StatisticsSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        rows = [((name, str(version)), stats) for name, version, stats in self._source()]
        labels = ("model", "version")
        for metric, text, read in _COUNTERS:
            counter = PlainCounter(metric, text, labels=labels)
            for key, statistics in rows:
                counter.add_metric(key, read(statistics))
            yield counter
        for metric, text, read in _CACHE_COUNTERS:
            counter = PlainCounter(metric, text, labels=labels)
            for key, statistics in rows:
                if statistics.cached:
                    counter.add_metric(key, read(statistics))
            yield counter
        failures = PlainCounter(
            "nv_inference_request_failure", "Failed requests", labels=(*labels, "reason")
        )
        pending = GaugeMetricFamily(
            "nv_inference_pending_request_count", "Requests awaiting an answer", labels=labels
        )
        histogram = HistogramMetricFamily(
            "nv_inference_first_response_histogram_ms", "Time to first response", labels=labels
        )
        for key, statistics in rows:
            for reason, count in statistics.failures.items():
                failures.add_metric((*key, reason), count)
            pending.add_metric(key, statistics.pending)
            rows_by_bound = _cumulative(FIRST_RESPONSE_BUCKETS_MS, statistics.first_response)
            histogram.add_metric(key, rows_by_bound, statistics.first_response_ns / 1e6)
        yield failures
        yield pending
        yield histogram


class TorchServeCollector(Collector):
    """The same counts under the names that dashboards for TorchServe already use."""

    def __init__(self, source: StatisticsSource) -> None:
        self._source = source
        self._host = socket.gethostname()

    def collect(self) -> Iterator[Metric]:
        labels = ("model_name", "model_version", "hostname")
        requests = CounterMetricFamily(
            "ts_inference_requests", "Total number of inference requests.", labels=labels
        )
        latency = PlainCounter(
            "ts_inference_latency_microseconds", "Total inference latency", labels=labels
        )
        queue = PlainCounter("ts_queue_latency_microseconds", "Total queue latency", labels=labels)
        for name, version, statistics in self._source():
            key = (name, str(version), self._host)
            requests.add_metric(key, statistics.success.count + statistics.fail.count)
            latency.add_metric(key, statistics.success.ns / 1000)
            queue.add_metric(key, statistics.queue.ns / 1000)
        yield from (requests, latency, queue)
        yield from self._by_status()

    def _by_status(self) -> Iterator[Metric]:
        """The requests for inference, in every dialect."""
        counts = dict.fromkeys(("2XX", "4XX", "5XX"), 0)
        for _, _, statistics in self._source():
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
            counter.add_metric(("Host", self._host), count)
            yield counter


class TfServingCollector(Collector):
    """What ``TfServingRequests`` has counted."""

    def __init__(self, requests: TfServingRequests) -> None:
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        requests = PlainCounter(
            ":tensorflow:serving:request_count",
            "The total number of requests.",
            labels=("model_name", "status"),
        )
        for key, count in self._requests.counts.items():
            requests.add_metric(key, count)
        latency = HistogramMetricFamily(
            ":tensorflow:serving:request_latency",
            "Distribution of wall time (in microseconds) for Tensorflow Serving request.",
            labels=("model_name", "API", "entrypoint"),
        )
        for labels, (buckets, total) in self._requests.latencies.items():
            rows = _cumulative(REQUEST_BUCKETS_US, buckets)
            latency.add_metric(labels, rows, total.ns / 1000)
        yield from (requests, latency)


class RequestMemoryUse(Protocol):
    """The budget of memory that requests share."""

    limit_bytes: int
    used_bytes: int
    refused: int


class RequestMemoryCollector(Collector):
    """The memory that requests hold, and how many were refused for want of it."""

    def __init__(self, memory: RequestMemoryUse) -> None:
        self._memory = memory

    def collect(self) -> Iterator[Metric]:
        memory = self._memory
        yield GaugeMetricFamily(
            "modelport_request_memory_used_bytes", "Memory that requests hold", memory.used_bytes
        )
        yield GaugeMetricFamily(
            "modelport_request_memory_limit_bytes",
            "Memory that requests may hold",
            memory.limit_bytes,
        )
        yield CounterMetricFamily(
            "modelport_request_memory_refused",
            "Requests refused for want of memory",
            memory.refused,
        )


class PlainCounter(CounterMetricFamily):
    """A counter whose samples carry the family's own name: these have no ``_total``.

    ``admin.metrics`` takes the suffix off the family's name in the text.
    """

    def add_metric(self, labels: Any, value: float, *_: Any, **__: Any) -> None:
        self.add_sample(self.name, dict(zip(self._labelnames, labels, strict=True)), value)


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    texts = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    totals = map(float, itertools.accumulate(counts))
    return list(zip(texts, totals, strict=True))
