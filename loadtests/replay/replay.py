"""Recorded requests, sent again at their own pace or another, and their answers compared."""

from __future__ import annotations

import base64
import http.client
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from modelport.gateway.errors import UsageError
from modelport.gateway.recording.record_reader import RecordedMessage, RecordedRequest
from modelport.loadtests.load.target import LoadTestTarget
from modelport.loadtests.replay.answer_comparison import (
    MOST_BYTES,
    Answer,
    Compared,
    ReplayOutcome,
    compare,
    framed,
    messages,
    status_of,
)
from modelport.loadtests.users import authentication

#: Statuses that depend on the load or the client, and not on the request.
CIRCUMSTANTIAL = frozenset(
    {"429", "499", "502", "503", "504", "401", "403"}
    | {"RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"}
    | {"UNAUTHENTICATED", "PERMISSION_DENIED"}
)
#: Examples of differences that are kept.
MOST_EXAMPLES = 10
#: Header fields that the client of a replay sets itself.
_OWN = frozenset(
    {"content-length", "host", "connection", "grpc-encoding", "authorization"}
    | {"transfer-encoding", "expect", "upgrade"}
)
#: The most that is read of an answer at once.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class ReplayRequest:
    """The settings of a replay.

    Attributes:
        http, grpc: The servers for records of each; None: there are none.
        speed: Multiple of the recorded pace.
        rate: Requests per second in its place.
        in_flight: Most requests at a time.
        absolute, relative: The tolerance.
    """

    http: LoadTestTarget | None
    grpc: LoadTestTarget | None
    speed: float = 1.0
    rate: float | None = None
    in_flight: int = 64
    absolute: float = 0.0
    relative: float = 0.0
    timeout_seconds: float = 30.0


class Example(NamedTuple):
    """A request whose answer differs."""

    id: str
    model: str
    target: str
    reason: str


@dataclass
class ReplayResult:
    """The outcomes, counted by model and dialect. Several threads add to it."""

    counts: dict[tuple[str, str], Counter[ReplayOutcome]] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    examples: list[Example] = field(default_factory=list)
    seconds: float = 0.0
    #: The longest delay of a request behind its time.
    late_seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, record: RecordedRequest, found: Compared) -> None:
        with self._lock:
            key = (record.model, str(record.data.get("dialect", "")))
            self.counts.setdefault(key, Counter())[found.outcome] += 1
            if found.outcome is ReplayOutcome.SKIPPED:
                self.skipped[found.reason] += 1
            is_bad = found.outcome in (ReplayOutcome.DIFFERENT, ReplayOutcome.FAILED)
            if is_bad and len(self.examples) < MOST_EXAMPLES:
                self.examples.append(Example(record.id, record.model, record.target, found.reason))

    def total(self, *outcomes: ReplayOutcome) -> int:
        return sum(count[each] for count in self.counts.values() for each in outcomes)

    @property
    def is_same(self) -> bool:
        """Whether some answers were compared, and none differs."""
        compared = self.total(ReplayOutcome.EQUAL, ReplayOutcome.CLOSE)
        return compared > 0 and not self.total(ReplayOutcome.DIFFERENT, ReplayOutcome.FAILED)


def replay(
    records: Iterable[RecordedRequest],
    asked: ReplayRequest,
    show: Callable[[int, float], None] = lambda done, seconds: None,
) -> ReplayResult:
    """Send the records in the order of their times.

    Args:
        show: told the number of requests and the seconds since the start.

    Raises:
        UsageError: a record needs a server that was not named.
    """
    result, clients = ReplayResult(), _Clients(asked)
    room = threading.Semaphore(asked.in_flight)
    began, first, number = time.monotonic(), None, 0

    def run(record: RecordedRequest) -> None:
        try:
            result.add(record, _outcome(record, clients, asked))
        finally:
            room.release()

    pending: deque[Any] = deque()
    with clients, ThreadPoolExecutor(asked.in_flight, "replay") as threads:
        for record in records:
            reason = _unsent(record)
            if reason:
                result.add(record, Compared(ReplayOutcome.SKIPPED, reason))
                continue
            clients.check(record)
            first = record.at if first is None else first
            due = number / asked.rate if asked.rate else (record.at - first) / asked.speed
            while (wait := began + due - time.monotonic()) > 0:
                show(number, time.monotonic() - began)
                time.sleep(min(wait, 1.0))
            room.acquire()
            result.late_seconds = max(result.late_seconds, time.monotonic() - began - due)
            pending.append(threads.submit(run, record))
            number += 1
            while pending and pending[0].done():
                pending.popleft().result()
            show(number, time.monotonic() - began)
        for each in pending:
            each.result()
    result.seconds = time.monotonic() - began
    return result


def _unsent(record: RecordedRequest) -> str:
    """The reason why a record is not sent again; empty if it is."""
    if record.data.get("bodies_redacted"):
        return "a rule has left out its bodies"
    if status_of(record) in CIRCUMSTANTIAL:
        return f"its status {status_of(record)} depends on circumstances"
    if record.request.body is None:
        return "its body was not read"
    body = record.request.body
    if b"shared_memory_region" in body:
        return "its tensors are in shared memory"
    if not record.target.startswith("/") or not record.target.isascii():
        return "its target is not a path"
    return ""


def _outcome(record: RecordedRequest, clients: _Clients, asked: ReplayRequest) -> Compared:
    try:
        answer = clients.ask(record)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Compared(ReplayOutcome.FAILED, f"no answer ({type(error).__name__})")
    return compare(record, answer, asked.absolute, asked.relative)


class _Clients:
    """The connections of a replay: over HTTP one for each thread, over gRPC one for all."""

    def __init__(self, asked: ReplayRequest) -> None:
        self._asked = asked
        self._local = threading.local()
        self._opened: list[http.client.HTTPConnection] = []
        self._channel: Any = None
        if asked.grpc is not None:
            import grpc

            options = [("grpc.max_receive_message_length", -1)]
            self._channel = (
                grpc.secure_channel(
                    asked.grpc.address, authentication.grpc_credentials(asked.grpc), options
                )
                if asked.grpc.tls
                else grpc.insecure_channel(asked.grpc.address, options)
            )

    def __enter__(self) -> _Clients:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._opened:
            each.close()
        if self._channel is not None:
            self._channel.close()

    def check(self, record: RecordedRequest) -> None:
        """Check that there is a server for a record."""
        is_grpc = record.protocol == "gRPC"
        if (self._asked.grpc if is_grpc else self._asked.http) is None:
            scheme, port = ("grpc", 8001) if is_grpc else ("http", 8000)
            raise UsageError(
                f"the records hold requests over {'gRPC' if is_grpc else 'HTTP'}; name a server "
                f"for them, too: --target {scheme}://HOST:{port}"
            )

    def ask(self, record: RecordedRequest) -> Answer:
        """Send a request; raise an error of the network if there is no answer."""
        return self._call(record) if record.protocol == "gRPC" else self._send(record)

    def _send(self, record: RecordedRequest) -> Answer:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect()
        try:
            try:
                return self._exchange(connection, record)
            except ConnectionError:  # the server has closed an idle connection
                connection.close()
                return self._exchange(connection, record)
        except BaseException:
            connection.close()
            raise

    def _connect(self) -> http.client.HTTPConnection:
        target = self._asked.http
        assert target is not None
        host, _, port = target.address.rpartition(":")
        context: ssl.SSLContext | None = authentication.context(target)
        seconds = self._asked.timeout_seconds
        made = (
            http.client.HTTPConnection(host.strip("[]"), int(port), timeout=seconds)
            if context is None
            else http.client.HTTPSConnection(
                host.strip("[]"), int(port), timeout=seconds, context=context
            )
        )
        self._opened.append(made)
        return made

    def _exchange(self, connection: http.client.HTTPConnection, record: RecordedRequest) -> Answer:
        assert self._asked.http is not None
        body = record.request.body or b""
        until = time.monotonic() + self._asked.timeout_seconds
        connection.putrequest(record.method, record.target, skip_accept_encoding=True)
        fields = _fields(record) | authentication.headers(self._asked.http)
        for name, value in fields.items():
            connection.putheader(name, value)
        if record.method not in ("GET", "HEAD") or body:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        content = bytearray()
        while piece := response.read1(_PIECE_BYTES):
            content += piece
            _check_size(len(content))
            if time.monotonic() > until:  # the connection has a limit for each piece
                raise TimeoutError("the answer takes too long")
        if response.length:
            raise http.client.IncompleteRead(bytes(content), response.length)
        response.close()  # the next request may use the connection
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(str(response.status), RecordedMessage(headers, bytes(content)))

    def _call(self, record: RecordedRequest) -> Answer:
        import grpc

        assert self._asked.grpc is not None
        fields = _fields(record).items()
        metadata: list[tuple[str, str | bytes]] = [
            (n, base64.b64decode(v + "==") if n.endswith("-bin") else v)
            for n, v in fields
            if not _is_reserved(n)
        ]
        metadata += authentication.headers(self._asked.grpc).items()
        call = self._channel.stream_stream(record.target)(
            _given(record), timeout=self._asked.timeout_seconds, metadata=metadata
        )
        got: list[bytes] = []
        size = 0
        try:
            for each in call:
                size += len(each)
                _check_size(size)
                got.append(each)
            status = "OK"
        except grpc.RpcError as error:
            status = error.code().name
            if status == "UNAVAILABLE" and not got:
                raise ConnectionError("no connection") from error
        return Answer(status, RecordedMessage({}, framed(got)))


def _given(record: RecordedRequest) -> Iterator[bytes]:
    return iter([*messages(record.request.body or b"")])


def _fields(record: RecordedRequest) -> dict[str, str]:
    return {n: v for n, v in record.request.headers.items() if n not in _OWN}


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise ValueError(f"the answer has more than {MOST_BYTES} bytes")


def _is_reserved(name: str) -> bool:
    return name in ("content-type", "te", "user-agent", "accept-encoding") or name.startswith(
        "grpc-"
    )
