"""Metrics of a model's own."""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from triton_python_backend_utils._errors import TritonModelException
from triton_python_backend_utils._runtime import Current

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class Metric:
    """One series of a family: its value for one set of labels."""

    def __init__(
        self,
        family: MetricFamily,
        labels: Mapping[str, str] | None = None,
        buckets: Sequence[float] | None = None,
    ) -> None:
        self._family = family
        self._labels = tuple(sorted((str(k), str(v)) for k, v in (labels or {}).items()))
        if any(not _LABEL.fullmatch(name) for name, _ in self._labels):
            raise TritonModelException("Invalid label name")
        histogram = family.kind == MetricFamily.HISTOGRAM
        if histogram and buckets is None:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        if buckets and not histogram:
            raise TritonModelException(
                f"Failed to create metric. Unexpected buckets for the kind {family.kind}."
            )
        self.buckets = tuple(map(float, buckets or ()))
        if any(b <= a for a, b in zip(self.buckets, self.buckets[1:], strict=False)):
            raise TritonModelException("Failed to create metric. Buckets are not in order.")
        self._value = 0.0
        self._update(f"declare {','.join(map(str, self.buckets))}".rstrip(), 0.0)

    def increment(self, value: float) -> None:
        """Add ``value``, which for a counter is not negative."""
        if self._family.kind == MetricFamily.HISTOGRAM:
            raise self._unsupported("increment", "Increment")
        if self._family.kind == MetricFamily.COUNTER and value < 0:
            raise self._failed(
                "increment",
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by "
                "non-negative values.",
            )
        self._value += value
        self._update("increment", value)

    def set(self, value: float) -> None:
        """Set a gauge."""
        if self._family.kind != MetricFamily.GAUGE:
            raise self._unsupported("set", "Set")
        self._value = float(value)
        self._update("set", value)

    def observe(self, value: float) -> None:
        """Add an observation to a histogram."""
        if self._family.kind != MetricFamily.HISTOGRAM:
            raise self._unsupported("observe", "Observe")
        self._update(f"observe {bisect.bisect_left(self.buckets, value)}", value)

    def value(self) -> float:
        """The current value, which all instances of the model share."""
        if self._family.kind == MetricFamily.HISTOGRAM:
            raise self._unsupported("get", "Value")
        shared = Current.runtime.metric_value(self._family.name, self._labels)
        return self._value if shared is None else shared

    def _update(self, operation: str, value: float) -> None:
        Current.runtime.update_metric(self._family.name, self._labels, operation, float(value))

    def _unsupported(self, verb: str, operation: str) -> TritonModelException:
        kind = f"TRITONSERVER_METRIC_KIND_{self._family.kind}"
        return self._failed(verb, f"{kind} does not support {operation}")

    def _failed(self, verb: str, reason: str) -> TritonModelException:
        return TritonModelException(f"Failed to {verb} metric value: {reason}")


class MetricFamily:
    """Metrics of one name, which differ in their labels."""

    COUNTER: ClassVar[str] = "COUNTER"
    GAUGE: ClassVar[str] = "GAUGE"
    HISTOGRAM: ClassVar[str] = "HISTOGRAM"

    def __init__(self, name: str, description: str, kind: str) -> None:
        if not _NAME.fullmatch(name):
            raise TritonModelException("Invalid metric name")
        if kind not in (self.COUNTER, self.GAUGE, self.HISTOGRAM):
            raise TritonModelException(f"Unknown metric kind {kind!r}")
        Current.runtime.declare_metrics(name, description, kind)
        self.name, self.description, self.kind = name, description, kind

    def Metric(  # noqa: N802 (Triton's name)
        self,
        labels: Mapping[str, str] | None = None,
        buckets: Sequence[float] | None = None,
    ) -> Metric:
        """The metric with ``labels``; a histogram has ``buckets``, in ascending order."""
        return Metric(self, labels, buckets)
