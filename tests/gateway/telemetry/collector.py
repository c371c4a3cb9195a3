"""A collector of OpenTelemetry, over gRPC and HTTP, that keeps the spans it gets."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service


class Collector(service.TraceServiceServicer):  # type: ignore[misc]
    """The spans that came, with the attributes of their resource."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.http_port = self.grpc_port = 0

    def take(self, request: Any) -> Any:
        for resource in request.resource_spans:
            self.resources.append(attributes(resource.resource))
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return pb.ExportTraceServiceResponse()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - as gRPC names it
        return self.take(request)

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def environment(self, protocol: str) -> dict[str, str]:
        """The variables by which a gateway sends its spans here, at once."""
        port = self.grpc_port if protocol == "grpc" else self.http_port
        return {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_BSP_SCHEDULE_DELAY": "20",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        }


def attributes(owner: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in owner.attributes
    }


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Collect on two ports of the system's choice."""
    collector = Collector()

    class OtlpHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            found = self.path == "/v1/traces"
            if found:
                collector.take(pb.ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if found else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Be quiet."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), OtlpHandler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    server = grpc.server(ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(collector, server)
    collector.grpc_port = server.add_insecure_port("127.0.0.1:0")
    collector.http_port = http.server_port
    server.start()
    try:
        yield collector
    finally:
        http.shutdown()
        http.server_close()
        server.stop(None).wait()
