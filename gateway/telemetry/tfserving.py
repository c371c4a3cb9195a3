"""What TensorFlow Serving counts of its requests."""

from __future__ import annotations

import bisect

from modelport.gateway.telemetry.statistics import StatisticDuration

#: Upper bounds of ``:tensorflow:serving:request_latency``, as there.
REQUEST_BUCKETS_US = tuple(10 * 1.8**exponent for exponent in range(33))


class TfServingRequests:
    """Requests of TensorFlow Serving's dialect, under its names (``servables/tensorflow/util.cc``).

    The event loop alone records; what is read at scrape time may be a request ahead of the rest.
    """

    def __init__(self) -> None:
        #: Of model and status.
        self.counts: dict[tuple[str, str], int] = {}
        #: Of model, API and entrypoint: a count for each bucket and one above, and their sum.
        self.latencies: dict[tuple[str, str, str], tuple[list[int], StatisticDuration]] = {}

    def record(self, model: str, api: str, entrypoint: str, status: str, ns: int) -> None:
        """One request is done.

        Args:
            model: its name if it is served, else empty: names that clients make up are not kept.
            api: ``Predict``, or ``predict`` over REST.
            entrypoint: ``GRPC`` or ``REST``.
            status: a canonical code; the latency of ``OK`` alone is counted.
        """
        self.counts[model, status] = self.counts.get((model, status), 0) + 1
        if status == "OK":
            key = (model, api, entrypoint)
            if key not in self.latencies:
                self.latencies[key] = ([0] * (len(REQUEST_BUCKETS_US) + 1), StatisticDuration())
            buckets, total = self.latencies[key]
            buckets[bisect.bisect_left(REQUEST_BUCKETS_US, ns / 1000)] += 1
            total.add(ns)
