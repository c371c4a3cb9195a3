"""Quantiles of latencies over the last minute, for Triton's summaries."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from modelport.gateway.types import Timing

#: Durations of the last ``SLOTS`` slots count.
SLOT_SECONDS, SLOTS = 10.0, 6
#: The logarithm of the ratio of two buckets' bounds: a quantile is exact to 1 %.
_STEP = math.log(1.02)
#: Metric without ``_us``, and description.
SUMMARIES = {
    "nv_inference_request_summary": "Request durations",
    "nv_inference_queue_summary": "Queue durations",
    "nv_inference_compute_input_summary": "Input preparations",
    "nv_inference_compute_infer_summary": "Model executions",
    "nv_inference_compute_output_summary": "Output preparations",
}
CACHE_SUMMARIES = {
    "nv_cache_hit_summary": "Look-ups of cache hits",
    "nv_cache_miss_summary": "Look-ups and insertions of cache misses",
}


class SlidingQuantiles:
    """Counts of durations by the logarithm of their microseconds, in slots of time."""

    __slots__ = ("_slots", "count", "total_ns")

    def __init__(self) -> None:
        self.count = self.total_ns = 0
        self._slots: deque[tuple[int, Counter[int]]] = deque(maxlen=SLOTS)

    def add(self, ns: int, now: float | None = None) -> None:
        self.count += 1
        self.total_ns += ns
        slot = _slot(now)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, Counter()))
        self._slots[-1][1][round(math.log(max(ns, 1)) / _STEP)] += 1

    def quantiles(self, wanted: Sequence[float], now: float | None = None) -> Iterator[float]:
        """The microseconds of each quantile; NaN if there was nothing in the last minute."""
        oldest = _slot(now) - SLOTS
        counts: Counter[int] = Counter()
        for slot, counted in self._slots:
            if slot > oldest:
                counts.update(counted)
        buckets, total = sorted(counts.items()), counts.total()
        for quantile in wanted:
            left, found = max(1, math.ceil(quantile * total)), math.nan
            for bucket, count in buckets:
                found, left = math.exp(bucket * _STEP) / 1000, left - count
                if left <= 0:
                    break
            yield found


def _slot(now: float | None) -> int:
    return int((time.monotonic() if now is None else now) // SLOT_SECONDS)


class LatencySummaries:
    """The summaries of a model version, by metric."""

    def __init__(self) -> None:
        self.by_metric = {metric: SlidingQuantiles() for metric in (*SUMMARIES, *CACHE_SUMMARIES)}

    def add(self, total_ns: int, timing: Timing) -> None:
        """Add a request that was answered."""
        add = self._add
        add("nv_inference_request_summary", total_ns)
        add("nv_inference_queue_summary", timing.queue_ns)
        if timing.cache_hit_ns:  # the model did not run
            add("nv_cache_hit_summary", timing.cache_hit_ns)
            return
        if timing.cache_miss_ns:
            add("nv_cache_miss_summary", timing.cache_miss_ns)
        add("nv_inference_compute_input_summary", timing.compute_input_ns)
        add("nv_inference_compute_infer_summary", timing.compute_infer_ns)
        add("nv_inference_compute_output_summary", timing.compute_output_ns)

    def _add(self, metric: str, ns: int) -> None:
        self.by_metric[metric].add(ns)
