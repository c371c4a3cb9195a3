"""TensorFlow Serving's request counters."""

from __future__ import annotations

import bisect

from modelport.gateway.telemetry.statistics import StatisticDuration

#: Upper bounds of ``:tensorflow:serving:request_latency``, as there.
REQUEST_BUCKETS_US = tuple(10 * 1.8**exponent for exponent in range(33))


class TfServingRequests:
    """Requests of TensorFlow Serving's dialect, under its names (``servables/tensorflow/util.cc``).

    Only the event loop records. A scrape may see one counter a request ahead of another.
    """

    def __init__(self) -> None:
        #: By model and status.
        self.counts: dict[tuple[str, str], int] = {}
        #: By model, API and entrypoint: a count for each bucket and one above, and the total.
        self.latencies: dict[tuple[str, str, str], tuple[list[int], StatisticDuration]] = {}

    def record(self, model: str, api: str, entrypoint: str, status: str, ns: int) -> None:
        """Count a finished request.

        Args:
            model: its name if it is served, else empty, because clients may send any name.
            api: ``Predict``, or ``predict`` over REST.
            entrypoint: ``GRPC`` or ``REST``.
            status: a canonical code; latencies are recorded only for ``OK``.
        """
        self.counts[model, status] = self.counts.get((model, status), 0) + 1
        if status == "OK":
            key = (model, api, entrypoint)
            if key not in self.latencies:
                self.latencies[key] = ([0] * (len(REQUEST_BUCKETS_US) + 1), StatisticDuration())
            buckets, total = self.latencies[key]
            buckets[bisect.bisect_left(REQUEST_BUCKETS_US, ns / 1000)] += 1
            total.add(ns)
