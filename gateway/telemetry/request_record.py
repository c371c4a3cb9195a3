"""The record of one request, and the parties that want it when the request ends.

Servers make records while ``RequestObserver.active``, which is one attribute to test; otherwise a
request has none. The parts that a request passes note in its record what they know.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import NamedTuple, Protocol

from modelport.gateway.telemetry.captured_traffic import CapturedInference, CapturedTraffic
from modelport.gateway.telemetry.spans import Span
from modelport.gateway.types import InferRequest, Timing

#: The id of a request in logs, and the bytes of it that are kept.
REQUEST_ID, MAX_REQUEST_ID = b"x-request-id", 128
#: Longer texts are cut, as many records may wait for the disk.
MAX_TEXT = 1024
GRPC = "gRPC"
#: The method each of whose messages is a request with a record of its own.
MESSAGES = b"/inference.GRPCInferenceService/ModelStreamInfer"
#: The headers of a request, names in lower case.
Fields = Mapping[bytes, bytes]
#: nginx's status of a request whose client did not wait for the response.
CLIENT_CLOSED_REQUEST = 499
_NO_FIELDS: Fields = MappingProxyType({})


class RouteNames(NamedTuple):
    """The names of a request's dialect and route, and whether it is for inference.

    The route is empty if no table of a dialect has it.
    """

    dialect: str = ""
    route: str = ""
    infers: bool = False


#: Names the route of a request by its protocol, method and path.
Describe = Callable[[str, str, bytes], RouteNames]


class RequestRecord:
    """A request, from its head to the end of its response.

    Attributes:
        started_at: Nanoseconds since the epoch; other times are those of ``time.perf_counter_ns``.
        protocol: ``HTTP/1.1`` and the like, or ``GRPC``, whose ``method`` is empty.
        client: Address of the client; empty on a UNIX domain socket.
        id: The client's own id of an inference request.
        status: HTTP status; 0 over gRPC, which has ``grpc_status``, the name of a code.
        side: The side of a rollout that answers: ``baseline`` or ``candidate``.
        error: The message of its error.
        streams: Whether each message of the request is one with a record of its own.
        chosen: Whether the request is to be traced.
        span: The span of the whole request, if it is part of a trace.
        captured: Its content, if it is to be recorded.
    """

    __slots__ = (
        "_observer", "caller", "captured", "chosen", "client", "ended", "ended_ns", "error",
        "fields", "grpc_status", "id", "is_failure", "method", "model", "path", "protocol",
        "request_bytes", "request_id", "response_bytes", "side", "span", "started_at",
        "started_ns", "status", "streams", "timing", "version",
    )  # fmt: skip

    def __init__(
        self,
        observer: RequestObserver,
        protocol: str,
        method: str,
        path: bytes,
        fields: Fields,
        client: str,
    ) -> None:
        self._observer = observer
        self.started_at, self.started_ns = time.time_ns(), time.perf_counter_ns()
        self.protocol, self.method, self.path = protocol, method[:MAX_TEXT], path[:MAX_TEXT]
        self.fields, self.client = fields, client
        self.version = self.status = self.request_bytes = self.response_bytes = self.ended_ns = 0
        self.caller = self.model = self.id = self.side = self.error = self.grpc_status = ""
        self.timing: Timing | None = None
        self.span: Span | None = None
        self.captured: CapturedTraffic | None = None
        self.chosen = self.ended = self.is_failure = self.streams = False
        stated = fields.get(REQUEST_ID)
        self.request_id = random_id() if stated is None else _request_id(stated)

    def infers(self, model: str, version: int, request: InferRequest) -> CapturedInference | None:
        """Note the inference request, and the version that answers it.

        The result gets the outputs, if they are to be recorded.
        """
        self.model, self.version, self.id = model, version, request.id[:MAX_TEXT]
        self.timing = request.timing
        tracer = self._observer.tracer
        if tracer is not None and self.span is None:
            tracer.begin(self)
            if self.span is not None:
                self.span.child("decode", self.started_ns, time.perf_counter_ns())
        request.span = self.span
        return None if self.captured is None else self.captured.infers(request)

    def failed(self, message: str) -> None:
        """Note the first error."""
        self.error = self.error or message[:MAX_TEXT]

    def message(self, size: int) -> RequestRecord:
        """Make the record of a request in this one's stream, and let the task have it."""
        self.streams, self.captured = True, None
        made = RequestRecord(
            self._observer, self.protocol, self.method, self.path, self.fields, self.client
        )
        made.request_id, made.caller, made.request_bytes = self.request_id, self.caller, size
        tracer = self._observer.tracer
        if tracer is not None:
            made.chosen = bool(tracer.wants(self.protocol, self.method, self.path, self.fields))
        if self._observer.recorder is not None:
            made.captured = self._observer.recorder.capture()
        CURRENT.set(made)
        return made

    def end_message(self) -> None:
        """End the record of a message in a stream, whose error is in a response of its own."""
        if isinstance(sys.exception(), asyncio.CancelledError):
            self.failed("the client has disconnected")
        self.end(0, "", is_failure=bool(self.error))

    def end(self, status: int, grpc_status: str = "", is_failure: bool = False) -> None:
        """Give the record to those who want it, once."""
        if self.ended:
            return
        self.ended, self.ended_ns = True, time.perf_counter_ns()
        self.status, self.grpc_status, self.is_failure = status, grpc_status, is_failure
        observer = self._observer
        if not self.streams or is_failure:
            if observer.tracer is not None:
                observer.tracer.end(self)
            if observer.access_log is not None:
                observer.access_log(self)
            if self.captured is not None and observer.recorder is not None:
                self.captured.take_unread(status)
                observer.recorder.record(self, self.captured)
        # The record waits for the disk; what else the request had does not.
        self.fields, self.captured = _NO_FIELDS, None

    def route(self) -> RouteNames:
        return self._observer.describe(self.protocol, self.method, self.path)


class RequestTracer(Protocol):
    """Chooses the requests that are traced, and exports their traces."""

    def wants(self, protocol: str, method: str, path: bytes, fields: Fields) -> bool | None:
        """Whether to trace a request that has begun, called once for each.

        False: its model or its client may ask for it. None: neither does.
        """

    def begin(self, record: RequestRecord) -> None:
        """Give an inference request its span, if it is to have one."""

    def end(self, record: RequestRecord) -> None:
        """Export the trace of a request that has ended."""


class TrafficRecorder(Protocol):
    """Chooses the requests that are recorded, and records them."""

    def capture(self) -> CapturedTraffic | None:
        """Make the place for the content of a request that has begun, if it may be recorded."""

    def record(self, record: RequestRecord, captured: CapturedTraffic) -> None:
        """Record a request that has ended."""


CURRENT: ContextVar[RequestRecord | None] = ContextVar("record", default=None)


class RequestObserver:
    """The parties that want the records of requests.

    Attributes:
        active: Whether there is any.
        describe: Set once, when the dialects are known.
        only_samples: Whether the recorder is the only one, so that most requests have no record.
        access_log, tracer, recorder: The parties; None: there is none.
    """

    def __init__(self) -> None:
        self.active = self.only_samples = False
        self.describe: Describe = lambda protocol, method, path: RouteNames()
        self.access_log: Callable[[RequestRecord], None] | None = None
        self.tracer: RequestTracer | None = None
        self.recorder: TrafficRecorder | None = None

    def log(self, access_log: Callable[[RequestRecord], None]) -> None:
        self.access_log = access_log
        self._changed()

    def keep(self, recorder: TrafficRecorder) -> None:
        self.recorder = recorder
        self._changed()

    def trace(self, tracer: RequestTracer | None) -> None:
        """Trace requests from now on, or no longer."""
        self.tracer = tracer
        self._changed()

    def _changed(self) -> None:
        others = self.tracer is not None or self.access_log is not None
        self.active = others or self.recorder is not None
        self.only_samples = self.active and not others

    def capture(self) -> CapturedTraffic | None:
        """Make the place for the content of a request, if it may be recorded."""
        return None if self.recorder is None else self.recorder.capture()

    def begin(
        self,
        protocol: str,
        method: str,
        path: bytes,
        fields: Fields,
        client: str,
        captured: CapturedTraffic | None = None,
    ) -> RequestRecord | None:
        """Make the record of a request; None: nobody wants it.

        The caller sets ``CURRENT`` in the context of the handler, whose parts find it there.
        """
        chosen = None
        if self.tracer is not None:
            chosen = self.tracer.wants(protocol, method, path, fields)
        if chosen is None and self.access_log is None and captured is None:
            # Each message of a stream may be recorded.
            holds_messages = self.recorder is not None and path == MESSAGES
            if not holds_messages:
                return None
        record = RequestRecord(self, protocol, method, path, fields, client)
        record.chosen, record.captured = bool(chosen), captured
        return record


#: The observer of a listener that nobody observes.
NOBODY = RequestObserver()


def _request_id(stated: bytes) -> str:
    """The client's id if it is printable ASCII, else one of our own."""
    text = stated[:MAX_REQUEST_ID].decode("latin-1")
    if text and text.isascii() and text.isprintable():
        return text
    return random_id()


def random_id() -> str:
    """Make an id of 32 hexadecimal digits."""
    # Formatting by ``032x`` takes three times as long.
    return random.getrandbits(128).to_bytes(16, "big").hex()
