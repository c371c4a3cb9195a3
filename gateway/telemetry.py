"""What is measured: statistics per model version, Prometheus metrics, logs.

The metrics have the names that dashboards of Triton, TensorFlow Serving and TorchServe use.

Statistics are plain integers that the event loop alone changes, so recording takes no lock;
Prometheus reads them when it scrapes.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import structlog
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gateway.errors import Code
from gateway.settings import LogFormat
from gateway.types import Timing

#: Upper bounds of ``nv_inference_first_response_histogram_ms``; Triton's defaults.
FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)
#: Upper bounds of ``:tensorflow:serving:request_latency``, as there.
REQUEST_BUCKETS_US = tuple(10 * 1.8**exponent for exponent in range(33))
#: Streams may be longer; what is counted by place stays bounded.
MAX_RESPONSE_STATISTICS = 1024
FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
_REASON_OF = {
    Code.UNAVAILABLE: "REJECTED",
    Code.CANCELLED: "CANCELED",
    Code.INTERNAL: "BACKEND",
}


class Duration:
    """A count and the nanoseconds it took, as the statistics extension reports them."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def document(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


class ResponseStatistics:
    """Counters of the responses in one place of their requests' streams."""

    __slots__ = ("cancel", "compute_infer", "compute_output", "empty_response", "fail", "success")

    def __init__(self) -> None:
        self.compute_infer = Duration()
        self.compute_output = Duration()
        self.success = Duration()
        self.fail = Duration()
        self.empty_response = Duration()
        self.cancel = Duration()

    def document(self) -> dict[str, Any]:
        return {
            "compute_infer": self.compute_infer.document(),
            "compute_output": self.compute_output.document(),
            "success": self.success.document(),
            "fail": self.fail.document(),
            "empty_response": self.empty_response.document(),
            "cancel": self.cancel.document(),
        }


class Statistics:
    """One model version's counters; they outlive a reload of the same version."""

    def __init__(self) -> None:
        self.last_inference_ms = 0
        self.inference_count = 0
        self.execution_count = 0
        self.success = Duration()
        self.fail = Duration()
        self.queue = Duration()
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()
        self.cache_hit = Duration()
        self.cache_miss = Duration()
        #: Whether a response cache is asked before the model.
        self.cached = False
        self.pending = 0
        self.failures = dict.fromkeys(FAILURE_REASONS, 0)
        self.first_response = [0] * (len(FIRST_RESPONSE_BUCKETS_MS) + 1)
        self.first_response_ns = 0
        #: Of a decoupled model, by a response's place in its request.
        self.responses: list[ResponseStatistics] = []
        self._batches: dict[int, tuple[Duration, Duration, Duration]] = {}

    def succeeded(self, batch: int, total_ns: int, timing: Timing, streamed: bool = False) -> None:
        """A request is answered; if ``streamed``, ``responded`` has counted its responses."""
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.success.add(total_ns)
        self.queue.add(timing.queue_ns)
        if not streamed:
            self._first_response(total_ns)
        if timing.cache_hit_ns:  # then nothing was inferred
            self.cache_hit.add(timing.cache_hit_ns)
            return
        if timing.cache_miss_ns:
            self.cache_miss.add(timing.cache_miss_ns)
        self.inference_count += batch
        self.compute_input.add(timing.compute_input_ns)
        self.compute_infer.add(timing.compute_infer_ns)
        self.compute_output.add(timing.compute_output_ns)
        if not timing.counted:
            self.executed(batch, timing)

    def executed(self, batch_size: int, timing: Timing) -> None:
        """The model was executed once, on ``batch_size`` elements of one request or of several."""
        self.execution_count += 1
        if batch_size not in self._batches:
            self._batches[batch_size] = (Duration(), Duration(), Duration())
        compute_input, compute_infer, compute_output = self._batches[batch_size]
        compute_input.add(timing.compute_input_ns)
        compute_infer.add(timing.compute_infer_ns)
        compute_output.add(timing.compute_output_ns)

    def _first_response(self, ns: int) -> None:
        self.first_response[bisect.bisect_left(FIRST_RESPONSE_BUCKETS_MS, ns / 1e6)] += 1
        self.first_response_ns += ns

    def response(self, index: int) -> ResponseStatistics:
        """Of the responses in place ``index``; those beyond the last that is kept share it."""
        index = min(index, MAX_RESPONSE_STATISTICS - 1)
        while len(self.responses) <= index:
            self.responses.append(ResponseStatistics())
        return self.responses[index]

    def responded(self, index: int, since_start_ns: int, infer_ns: int, output_ns: int) -> None:
        """Response ``index`` of a request to a decoupled model is there."""
        if index == 0:
            self._first_response(since_start_ns)
        response = self.response(index)
        response.compute_infer.add(infer_ns)
        response.compute_output.add(output_ns)
        response.success.add(infer_ns + output_ns)

    def not_responded(self, index: int, ns: int, error: BaseException | None = None) -> None:
        """In the place of response ``index`` there is an end, or ``error``."""
        response = self.response(index)
        if error is None:
            response.empty_response.add(ns)
        elif isinstance(error, Exception):
            response.fail.add(ns)
        else:
            response.cancel.add(ns)

    def failed(self, code: Code, total_ns: int) -> None:
        self.fail.add(total_ns)
        self.failures[_REASON_OF.get(code, "OTHER")] += 1

    def document(self, name: str, version: int) -> dict[str, Any]:
        """The entry of ``model_stats`` (Triton's statistics extension)."""
        durations = (
            "success fail queue compute_input compute_infer compute_output cache_hit cache_miss"
        )
        return {
            "name": name,
            "version": str(version),
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {key: getattr(self, key).document() for key in durations.split()},
            "response_stats": {
                str(index): response.document() for index, response in enumerate(self.responses)
            },
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": compute_input.document(),
                    "compute_infer": compute_infer.document(),
                    "compute_output": compute_output.document(),
                }
                for size, (compute_input, compute_infer, compute_output) in sorted(
                    self._batches.items()
                )
            ],
            "memory_usage": [],
        }


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


class TfServingRequests(Collector):
    """Requests of TensorFlow Serving's dialect, under its names (``servables/tensorflow/util.cc``).

    The event loop alone records; what is read at scrape time may be a request ahead of the rest.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._latencies: dict[tuple[str, str, str], tuple[list[int], Duration]] = {}

    def record(self, model: str, api: str, entrypoint: str, status: str, ns: int) -> None:
        """One request is done.

        Args:
            model: its name if it is served, else empty: names that clients make up are not kept.
            api: ``Predict``, or ``predict`` over REST.
            entrypoint: ``GRPC`` or ``REST``.
            status: a canonical code; the latency of ``OK`` alone is counted.
        """
        self._counts[model, status] = self._counts.get((model, status), 0) + 1
        if status == "OK":
            key = (model, api, entrypoint)
            if key not in self._latencies:
                self._latencies[key] = ([0] * (len(REQUEST_BUCKETS_US) + 1), Duration())
            buckets, total = self._latencies[key]
            buckets[bisect.bisect_left(REQUEST_BUCKETS_US, ns / 1000)] += 1
            total.add(ns)

    def collect(self) -> Iterator[Metric]:
        requests = PlainCounter(
            ":tensorflow:serving:request_count",
            "The total number of requests.",
            labels=("model_name", "status"),
        )
        for key, count in self._counts.items():
            requests.add_metric(key, count)
        latency = HistogramMetricFamily(
            ":tensorflow:serving:request_latency",
            "Distribution of wall time (in microseconds) for Tensorflow Serving request.",
            labels=("model_name", "API", "entrypoint"),
        )
        for labels, (buckets, total) in self._latencies.items():
            rows = _cumulative(REQUEST_BUCKETS_US, buckets)
            latency.add_metric(labels, rows, total.ns / 1000)
        yield from (requests, latency)


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


class _StandardError:
    """Its reader may go: then the log is lost, and nothing else with it."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure_logging(log_format: LogFormat, verbose: int, worker: int | None = None) -> None:
    """Send structlog's and the libraries' records to stderr, one line each.

    Those of a ``worker`` name it. What all workers say alike, the first one alone says: the others
    start with warnings, unless ``verbose``.
    """
    output: Any = _StandardError()
    renderer: Any = structlog.processors.JSONRenderer()
    if log_format is not LogFormat.JSON:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    stamp = "iso" if log_format is not LogFormat.DEFAULT else "%H:%M:%S.%f"
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt=stamp, utc=log_format is not LogFormat.DEFAULT),
        structlog.processors.format_exc_info,
    ]
    if worker is not None:
        shared.append(lambda _, __, event: {**event, "worker": worker})
    least = logging.WARNING if worker else logging.INFO
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if verbose else least),
        logger_factory=structlog.PrintLoggerFactory(output),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(processor=renderer, foreign_pre_chain=shared)
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
