"""OpenTelemetry: contexts of traces in and out, and spans to an OTLP collector.

Only this module imports OpenTelemetry's SDK, which the extra ``otel`` installs. The environment
configures it: ``OTEL_EXPORTER_OTLP_*``, ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_PROPAGATORS`` ...
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from modelport import __version__
from modelport.gateway.errors import Unsupported
from modelport.gateway.settings import TraceConfig
from modelport.gateway.telemetry.request_record import GRPC, Fields, RequestRecord, RouteNames
from modelport.gateway.telemetry.spans import Span, Trace

#: As the specification says (``OTEL_EXPORTER_OTLP_PROTOCOL``).
DEFAULT_PROTOCOL: Final = "http/protobuf"
#: Time to send what is left when the gateway ends.
CLOSE_SECONDS: Final = 2.0
#: Time for a call to the collector to end once it is cancelled.
CANCEL_SECONDS: Final = 0.5
#: Longer paths are cut.
MAX_PATH: Final = 256
#: Numbers of ``--trace-config opentelemetry``, and what the SDK calls them.
_BATCHING: Final = {
    "bsp_max_queue_size": "max_queue_size",
    "bsp_schedule_delay": "schedule_delay_millis",
    "bsp_max_export_batch_size": "max_export_batch_size",
}
_SAMPLED, _UNSAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
_UNSET: Final = Status()


class OpenTelemetry:
    """Reads and writes contexts, asks the sampler, and exports finished traces.

    Raises:
        Unsupported: The environment names an exporter or protocol that is not OTLP's.
    """

    def __init__(self, config: TraceConfig) -> None:
        made = Resource.create({"service.version": __version__})
        if str(made.attributes["service.name"]).startswith("unknown_service"):
            made = made.merge(Resource({"service.name": "modelport"}))
        self._resource = _HashedOnce(made.merge(Resource(dict(config.resource))))
        # It reads the sampler from the environment.
        self._sampler = TracerProvider(resource=self._resource, shutdown_on_exit=False).sampler
        numbers: dict[str, Any] = {_BATCHING[name]: value for name, value in config.batching}
        self._exporter = _Closable(_exporter(config.url))
        self._processor = BatchSpanProcessor(self._exporter, **numbers)
        self._scope = InstrumentationScope("modelport", __version__)
        self._propagator = propagate.get_global_textmap()
        #: The headers that may have a context.
        self.fields = frozenset(name.lower().encode() for name in self._propagator.fields)
        # Spans have times of the monotonic clock.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    def begin(self, fields: Fields, chosen: bool) -> Trace | None:
        """Begin the trace of a request by its headers; None if it has no part in one.

        Args:
            chosen: Whether a request without a client's context is to be traced.
        """
        context, parent = Context(), None
        if not self.fields.isdisjoint(fields):
            carrier = {
                name.decode("latin-1"): fields[name].decode("latin-1")
                for name in self.fields & fields.keys()
            }
            context = self._propagator.extract(carrier, context)
            parent = trace.get_current_span(context).get_span_context()
        is_part = parent is not None and parent.is_valid
        id, span_id = random.getrandbits(128) or 1, 0
        if parent is not None and is_part:
            id, span_id = parent.trace_id, parent.span_id
        sampled = False
        if is_part or chosen:
            result = self._sampler.should_sample(context, id, "request", SpanKind.SERVER)
            sampled = result.decision is Decision.RECORD_AND_SAMPLE
        if not sampled and not context:
            return None
        return Trace(id, span_id, sampled, context, self._inject)

    def _inject(self, span: Span) -> Mapping[str, str]:
        carrier: dict[str, str] = {}
        own = NonRecordingSpan(_context(span.trace, span.id, _state(span.trace)))
        context = trace.set_span_in_context(own, span.trace.context)
        self._propagator.inject(carrier, context)
        return carrier

    def export(self, record: RequestRecord) -> None:
        """Hand the spans of a request that has ended to the exporter's thread."""
        root = record.span
        assert root is not None
        route = record.route()
        root.name = route.route if record.protocol == GRPC else f"{record.method} {route.route}"
        root.name = root.name.strip() or "request"
        root.attributes |= _attributes(record, route)
        if root.trace.dropped:
            root.attributes["modelport.dropped_spans"] = root.trace.dropped
        state = _state(root.trace)  # once, as it takes longer than a span's context
        for span in root.trace.spans:
            kind = SpanKind.CLIENT if span.client else SpanKind.INTERNAL
            parent_id, is_remote = span.parent_id or root.trace.parent_id, not span.parent_id
            self._processor.on_end(
                ReadableSpan(
                    span.name,
                    _context(root.trace, span.id, state),
                    _context(root.trace, parent_id, state, is_remote) if parent_id else None,
                    self._resource,
                    span.attributes,
                    links=[
                        Link(_context(each.trace, each.id, _state(each.trace)))
                        for each in span.links
                    ],
                    kind=SpanKind.SERVER if span is root else kind,
                    status=Status(StatusCode.ERROR, span.error) if span.error else _UNSET,
                    start_time=self._epoch_ns + span.started_ns,
                    end_time=self._epoch_ns + (span.ended_ns or record.ended_ns),
                    instrumentation_scope=self._scope,
                )
            )

    def close(self) -> None:
        """Send what is left, unless the collector takes too long."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        # The SDK would try again for half a minute, and log each try, long after the gateway's end.
        self._exporter.shutdown()
        closing.join(CANCEL_SECONDS)


class _HashedOnce(Resource):
    """A resource whose hash is kept.

    The exporter groups spans by their resources, and would make a text of each span's for that.
    """

    def __init__(self, resource: Resource) -> None:
        super().__init__(dict(resource.attributes), resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class _Closable(SpanExporter):
    """An exporter that may be shut down while it sends, and twice; it drops later spans."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._once = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._once.locked():
            return SpanExportResult.FAILURE
        return self._exporter.export(spans)

    def shutdown(self) -> None:
        if self._once.acquire(blocking=False):
            self._exporter.shutdown()


def _exporter(url: str) -> SpanExporter:
    """The exporter of the protocol that the environment names."""
    named = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    protocol = named or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or DEFAULT_PROTOCOL
    if protocol not in ("grpc", DEFAULT_PROTOCOL):
        raise Unsupported(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is '{protocol}'; use grpc or {DEFAULT_PROTOCOL}"
        )
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_exporter

        return grpc_exporter.OTLPSpanExporter(url or None)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_exporter

    return http_exporter.OTLPSpanExporter(url or None)


def _attributes(record: RequestRecord, route: RouteNames) -> dict[str, Any]:
    """The attributes of a request's span, by the semantic conventions of HTTP and RPC."""
    found: dict[str, Any] = {
        "client.address": record.client,
        "modelport.request_id": record.request_id,
        "modelport.dialect": route.dialect,
        "modelport.model": record.model,
        "modelport.version": record.version,
        "modelport.caller": record.caller,
        "modelport.rollout": record.side,
        "modelport.id": record.id,
    }
    if record.protocol == GRPC:
        found |= {
            "rpc.system.name": "grpc",
            "rpc.method": route.route,
            "rpc.response.status_code": record.grpc_status,
        }
    else:
        found |= {
            "http.request.method": record.method,
            "http.route": route.route,
            "http.response.status_code": record.status,
            "url.path": record.path[:MAX_PATH].decode("latin-1"),
            "network.protocol.version": record.protocol.removeprefix("HTTP/"),
        }
    found = {name: value for name, value in found.items() if value}
    found["http.request.body.size"] = record.request_bytes
    found["http.response.body.size"] = record.response_bytes
    if record.timing is not None:
        found["modelport.batch_size"] = record.timing.batch_size
    return found


def _context(of: Trace, id: int, state: TraceState, is_remote: bool = False) -> SpanContext:
    return SpanContext(of.id, id, is_remote, _SAMPLED if of.sampled else _UNSAMPLED, state)


def _state(of: Trace) -> TraceState:
    """The ``tracestate`` of the client's context."""
    return trace.get_current_span(of.context).get_span_context().trace_state
