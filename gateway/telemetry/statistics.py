"""Counters per model version: plain integers that only the event loop changes.

So recording takes no lock; Prometheus and the statistics extension read them directly.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

from modelport.gateway.errors import Code
from modelport.gateway.telemetry.spans import Span
from modelport.gateway.telemetry.summaries import LatencySummaries
from modelport.gateway.types import Timing

#: Upper bounds of ``nv_inference_first_response_histogram_ms``; Triton's defaults.
FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)
#: Upper bounds of the histograms of whole requests and of their phases.
PHASE_BUCKETS_US = (
    100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
    1_000_000, 2_000_000, 5_000_000, 10_000_000,
)  # fmt: skip
_BOUNDS_NS = tuple(1000 * bound for bound in PHASE_BUCKETS_US)
_LEAST_NS = _BOUNDS_NS[0]
#: Streams may be longer; this bounds the number of counters.
MAX_RESPONSE_STATISTICS = 1024
#: Phases of a request; each has a ``StatisticDuration``, that of ``request`` is ``success``.
PHASES = ("request", "queue", "compute_input", "compute_infer", "compute_output")
FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
_REASON_OF = {
    Code.UNAVAILABLE: "REJECTED",
    Code.QUOTA_EXCEEDED: "REJECTED",
    Code.CANCELLED: "CANCELED",
    Code.INTERNAL: "BACKEND",
}


class StatisticDuration:
    """A count and a duration in nanoseconds, as the statistics extension reports them."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def document(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


class TraceExemplar(NamedTuple):
    """A traced request, as an example of the bucket of a histogram that it fell into."""

    trace_id: str
    span_id: str
    us: float
    at: float


class ResponseStatistics:
    """Counters of the responses with one index in their streams."""

    def __init__(self) -> None:
        self.compute_infer = StatisticDuration()
        self.compute_output = StatisticDuration()
        self.success = StatisticDuration()
        self.fail = StatisticDuration()
        self.empty_response = StatisticDuration()
        self.cancel = StatisticDuration()

    def document(self) -> dict[str, Any]:
        return {name: duration.document() for name, duration in vars(self).items()}


#: Input, inference, output.
_Compute = tuple[StatisticDuration, StatisticDuration, StatisticDuration]


def _add(compute: _Compute, timing: Timing) -> None:
    """Add ``timing``; written out because every request calls it twice."""
    compute_input, compute_infer, compute_output = compute
    compute_input.count += 1
    compute_input.ns += timing.compute_input_ns
    compute_infer.count += 1
    compute_infer.ns += timing.compute_infer_ns
    compute_output.count += 1
    compute_output.ns += timing.compute_output_ns


class Statistics:
    """The counters of a model version; they survive a reload of the same version.

    Args:
        buckets_ms: upper bounds of ``nv_inference_first_response_histogram_ms``.
    """

    def __init__(
        self, buckets_ms: Sequence[float] = FIRST_RESPONSE_BUCKETS_MS, summarized: bool = False
    ) -> None:
        self.buckets_ms = buckets_ms
        #: Quantiles of latencies, with ``summarized``.
        self.summaries = LatencySummaries() if summarized else None
        #: The repository of the model, with ``--model-namespacing``.
        self.namespace = ""
        self.last_inference_ms = 0
        self.inference_count = 0
        self.execution_count = 0
        self.success = StatisticDuration()
        self.fail = StatisticDuration()
        self.queue = StatisticDuration()
        self.compute_input = StatisticDuration()
        self.compute_infer = StatisticDuration()
        self.compute_output = StatisticDuration()
        self._compute: _Compute = (self.compute_input, self.compute_infer, self.compute_output)
        self.cache_hit = StatisticDuration()
        self.cache_miss = StatisticDuration()
        #: Whether the model has a response cache.
        self.cached = False
        #: Requests in flight, and the timings of those that were not answered at once.
        self.pending = 0
        self.waiting: dict[int, Timing] = {}
        self.failures = dict.fromkeys(FAILURE_REASONS, 0)
        self.first_response = [0] * (len(buckets_ms) + 1)
        self.first_response_ns = 0
        #: Requests by their time in each phase: a count for each bucket and one above.
        self.phases = {name: [0] * (len(_BOUNDS_NS) + 1) for name in PHASES}
        self._request, self._queue, self._input, self._infer, self._output = self.phases.values()
        #: The latest traced request of each phase and bucket.
        self.exemplars: dict[tuple[str, int], TraceExemplar] = {}
        #: For a decoupled model, by the index of a response.
        self.responses: list[ResponseStatistics] = []
        self._batches: dict[int, _Compute] = {}

    @property
    def queued(self) -> int:
        """The number of requests that wait for an instance."""
        return sum(not (each.joined or each).begun for each in self.waiting.values())

    def succeeded(self, batch: int, total_ns: int, timing: Timing, streamed: bool = False) -> None:
        """Count an answered request; if ``streamed``, ``responded`` has counted its responses.

        Every request comes here, so ``add`` is written out, and short phases are not bisected.
        """
        self.last_inference_ms = time.time_ns() // 1_000_000
        success, queue = self.success, self.queue
        success.count += 1
        success.ns += total_ns
        queue.count += 1
        queue.ns += timing.queue_ns
        self._request[bisect_left(_BOUNDS_NS, total_ns)] += 1
        ns = timing.queue_ns
        self._queue[bisect_left(_BOUNDS_NS, ns) if ns > _LEAST_NS else 0] += 1
        if not streamed:
            self.first_response[bisect_left(self.buckets_ms, total_ns / 1e6)] += 1
            self.first_response_ns += total_ns
        if self.summaries is not None:
            self.summaries.add(total_ns, timing)
        if timing.cache_hit_ns:  # the model did not run
            self.cache_hit.add(timing.cache_hit_ns)
            return
        if timing.cache_miss_ns:
            self.cache_miss.add(timing.cache_miss_ns)
        self.inference_count += batch
        ns = timing.compute_input_ns
        self._input[bisect_left(_BOUNDS_NS, ns) if ns > _LEAST_NS else 0] += 1
        ns = timing.compute_infer_ns
        self._infer[bisect_left(_BOUNDS_NS, ns) if ns > _LEAST_NS else 0] += 1
        ns = timing.compute_output_ns
        self._output[bisect_left(_BOUNDS_NS, ns) if ns > _LEAST_NS else 0] += 1
        _add(self._compute, timing)
        if not timing.counted:
            self.executed(batch, timing)

    def traced(self, total_ns: int, timing: Timing, span: Span) -> None:
        """Keep a request that ``succeeded`` has counted as an exemplar."""
        if not span.trace.sampled:
            return
        at = time.time()
        durations = [total_ns, timing.queue_ns]
        if not timing.cache_hit_ns:
            durations += timing.compute_input_ns, timing.compute_infer_ns, timing.compute_output_ns
        ids = f"{span.trace.id:032x}", f"{span.id:016x}"
        for phase, ns in zip(PHASES, durations, strict=False):
            bucket = bisect_left(_BOUNDS_NS, ns)
            self.exemplars[phase, bucket] = TraceExemplar(*ids, ns / 1000, at)

    def executed(self, batch_size: int, timing: Timing) -> None:
        """Count one execution of the model with ``batch_size`` elements of one or more requests."""
        self.execution_count += 1
        compute = self._batches.get(batch_size)
        if compute is None:
            compute = (StatisticDuration(), StatisticDuration(), StatisticDuration())
            self._batches[batch_size] = compute
        _add(compute, timing)

    def _first_response(self, ns: int) -> None:
        self.first_response[bisect_left(self.buckets_ms, ns / 1e6)] += 1
        self.first_response_ns += ns

    def response(self, index: int) -> ResponseStatistics:
        """The counters of responses with the index ``index``; the highest indexes share one."""
        index = min(index, MAX_RESPONSE_STATISTICS - 1)
        while len(self.responses) <= index:
            self.responses.append(ResponseStatistics())
        return self.responses[index]

    def responded(self, index: int, since_start_ns: int, infer_ns: int, output_ns: int) -> None:
        """Count response ``index`` of a request to a decoupled model."""
        if index == 0:
            self._first_response(since_start_ns)
        response = self.response(index)
        response.compute_infer.add(infer_ns)
        response.compute_output.add(output_ns)
        response.success.add(infer_ns + output_ns)

    def not_responded(self, index: int, ns: int, error: BaseException | None = None) -> None:
        """Count the end of a stream, or ``error``, in place of response ``index``."""
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
