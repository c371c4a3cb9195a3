"""The choice of requests that are traced, by Triton's settings, and the way of their traces."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelport.gateway import extras
from modelport.gateway.settings import TraceConfig, TraceMode
from modelport.gateway.telemetry.request_record import (
    Fields,
    RequestObserver,
    RequestRecord,
)
from modelport.gateway.telemetry.spans import Span, Trace
from modelport.gateway.telemetry.trace_file import TraceFile
from modelport.gateway.telemetry.trace_settings import LEVEL, TENSORS, Changes, TraceSettings

if TYPE_CHECKING:
    from modelport.gateway.telemetry.trace_export import OpenTelemetry


class TraceCounter:
    """Counts the requests of a setting: one of ``rate`` is traced, ``count`` of them at most."""

    __slots__ = ("left", "rate", "seen")

    def __init__(self, rate: int, count: int) -> None:
        self.rate, self.left, self.seen = rate, count, 0

    def chooses(self) -> bool:
        """Count a request; whether it is traced."""
        if not self.rate or not self.left:
            return False
        self.seen += 1
        if self.seen % self.rate:
            return False
        self.left -= self.left > 0
        return True


class Tracer:
    """A ``RequestTracer``: it observes only while a setting asks for traces.

    Raises:
        Unsupported: OpenTelemetry is asked for, and not installed.
    """

    def __init__(
        self, config: TraceConfig, observer: RequestObserver, worker: int | None = None
    ) -> None:
        self.settings = TraceSettings(config)
        self._observer = observer
        self._file: TraceFile | None = None
        self._export: OpenTelemetry | None = None
        #: The headers that may have a client's context.
        self._context_fields: Sequence[bytes] = ()
        if config.mode is TraceMode.TRITON and config.file:
            self._file = TraceFile(Path(f"{config.file}.worker{worker}" if worker else config.file))
        #: By model; empty: the global one. None: no traces.
        self._counters: dict[str, TraceCounter | None] = {}
        self._apply("")

    def update(self, model: str, changes: Changes) -> None:
        """Change settings, as ``TraceSettings.update``."""
        self.settings.update(model, changes)
        self._apply(model)

    def _apply(self, model: str) -> None:
        """Restart the counts of a model, or all counts if the global settings have changed."""
        for name in {model, *(self.settings.changed if not model else ())}:
            values = self.settings.values(name)
            if name and name not in self.settings.changed:
                self._counters.pop(name, None)
            elif values[LEVEL]:
                self._counters[name] = TraceCounter(values["trace_rate"], values["trace_count"])
            else:
                self._counters[name] = None
        traces = any(each is not None for each in self._counters.values())
        if traces and self._export is None and self.settings.config.mode is TraceMode.OPENTELEMETRY:
            with extras.naming_extras():
                from modelport.gateway.telemetry import trace_export

            self._export = trace_export.OpenTelemetry(self.settings.config)
            self._context_fields = tuple(self._export.fields)
        self._observer.trace(self if traces else None)

    def document(self, model: str = "") -> dict[str, Any]:
        """The settings as the trace extension reports them: ``trace_count`` is what remains."""
        document = self.settings.document(model)
        counter = self._counters.get(model, self._counters[""])
        if counter is not None:
            document["trace_count"] = str(counter.left)
        return document

    def close(self) -> None:
        """Write and send what is left."""
        if self._file is not None:
            self._file.close()
        if self._export is not None:
            self._export.close()

    # -- requests ---------------------------------------------------------------------------------

    def wants(self, protocol: str, method: str, path: bytes, fields: Fields) -> bool | None:
        if not self._observer.describe(protocol, method, path).infers:
            return None
        counter = self._counters[""]
        if counter is not None and counter.chooses():
            return True
        # A model's own setting, or the client's context, may ask for what the global one does not.
        if len(self._counters) > 1:
            return False
        # Not by ``isdisjoint``, which would hash the name of each header.
        for name in self._context_fields:
            if name in fields:
                return False
        return None

    def begin(self, record: RequestRecord) -> None:
        name = record.model if record.model in self._counters else ""
        counter = self._counters[name]
        chosen = record.chosen
        if name:
            chosen = counter is not None and counter.chooses()
        trace: Trace | None = None
        if self._export is not None:
            trace = self._export.begin(record.fields, chosen)
        elif chosen:
            trace = Trace(random.getrandbits(128), 0, True)
        if trace is not None:
            record.span = Span(trace, 0, "request", record.started_ns)
            if TENSORS in self.settings.values(name)[LEVEL]:
                trace.tensors = []

    def end(self, record: RequestRecord) -> None:
        if record.span is None and record.chosen and record.is_failure:
            self.begin(record)  # it has failed before its model was known
        if record.span is None or not record.span.trace.sampled:
            return
        root, trace = record.span, record.span.trace
        if trace.answered_ns:
            root.child("encode", trace.answered_ns, record.ended_ns)
        root.ended_ns = record.ended_ns
        if record.is_failure:
            root.error = record.error or record.grpc_status or f"status {record.status}"
        if self._export is not None:
            self._export.export(record)
        elif self._file is not None:
            values = self.settings.values(record.model)
            counter = self._counters.get(record.model, self._counters[""])
            is_last = counter is not None and not counter.left
            self._file.add(record, values["log_frequency"], is_last)
