"""The access log: one line of JSON for each request."""

from __future__ import annotations

import random
import select
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final

import orjson
from prometheus_client.core import CounterMetricFamily, Metric

from modelport.gateway.settings import AccessLogSettings
from modelport.gateway.telemetry.log_file import LogFile, dump
from modelport.gateway.telemetry.request_record import RequestRecord

#: Longer texts are cut, so that a line, with its escapes, fits in what a pipe takes in one piece.
MAX_TEXT: Final = 128
#: A line may wait this long for others, to be written with them.
LINGER_SECONDS: Final = 0.1
#: Lines that are kept in memory: the latest of all, and of failed and slow requests.
KEPT, KEPT_NOTABLE = 256, 128
#: ``requests`` and ``notable``: the fields of lines, latest first.
RECENT = {"requests": KEPT, "notable": KEPT_NOTABLE}
RecentRequests = dict[str, list[dict[str, Any]]]


class _Stamps:
    """Formats times, each second's date once."""

    def __init__(self) -> None:
        self._second, self._date = -1, ""

    def stamp(self, ns: int) -> str:
        second, rest = divmod(ns, 1_000_000_000)
        if second != self._second:
            self._date = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = second
        return f"{self._date}.{rest // 1_000_000:03}Z"


_STAMPS = _Stamps()


class AccessLog:
    """Writes the lines of the requests that are sampled, have failed or were slow.

    Args:
        worker: Number of the process, if it is one of several.

    Raises:
        Unavailable: The file cannot be written.
    """

    def __init__(self, settings: AccessLogSettings, worker: int | None = None) -> None:
        # Its thread makes many lines at a time: one by one, each takes twice as long.
        self.file = LogFile(self._line, "access-log", settings.target, None, LINGER_SECONDS)
        self._share = settings.sample
        self._slow_ns = settings.slow_seconds * 1e9
        self._worker = worker
        self._kept: deque[bytes] = deque(maxlen=KEPT)
        self._notable: deque[bytes] = deque(maxlen=KEPT_NOTABLE)

    def __call__(self, record: RequestRecord) -> None:
        """Write the line of a request that has ended, if it is to have one."""
        if self._share >= 1.0 or self._is_notable(record) or random.random() < self._share:
            self.file.append(record)

    def _is_notable(self, record: RequestRecord) -> bool:
        return record.is_failure or record.ended_ns - record.started_ns >= self._slow_ns

    def _line(self, record: RequestRecord) -> bytes:
        """Make the line of a record, and keep it."""
        made = line(record, self._worker)
        (self._notable if self._is_notable(record) else self._kept).append(made)
        return made

    def recent(self) -> RecentRequests:
        """The latest requests in the log; ``notable`` are those that have failed or were slow."""
        # Copied at once, because the thread of the file appends to them.
        both = self._notable.copy(), self._kept.copy()
        notable, others = ([*map(orjson.loads, kept)] for kept in both)
        return {"requests": latest([*others, *notable], KEPT), "notable": notable[::-1]}


def latest(rows: Iterable[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """The latest of the lines, latest first."""
    return sorted(rows, key=itemgetter("time"), reverse=True)[:most]


def merged(answers: Sequence[RecentRequests]) -> RecentRequests:
    """The latest requests of several processes."""
    rows = {name: [row for each in answers for row in each[name]] for name in RECENT}
    return {name: latest(rows[name], most) for name, most in RECENT.items()}


def access_log_families(access_log: AccessLog) -> Iterator[Metric]:
    """The lines that are missing in the access log."""
    yield CounterMetricFamily(
        "modelport_access_log_dropped",
        "Lines missing from the access log because the disk was full or slow",
        value=access_log.file.dropped,
    )


def line(record: RequestRecord, worker: int | None = None) -> bytes:
    """Make the line of a record; it has no fields of what is not known."""
    fields: dict[str, Any] = {
        "time": _STAMPS.stamp(record.started_at),
        "request_id": record.request_id,
    }
    if record.client:
        fields["client"] = record.client
    if record.caller:
        fields["caller"] = record.caller[:MAX_TEXT]
    fields["protocol"] = record.protocol
    dialect = record.route().dialect
    if dialect:
        fields["dialect"] = dialect
    if record.method:
        fields["method"] = record.method[:MAX_TEXT]
    fields["path"] = record.path[:MAX_TEXT].decode("latin-1")
    if record.status:
        fields["status"] = record.status
    if record.grpc_status:
        fields["grpc_status"] = record.grpc_status
    if record.model:
        fields["model"] = record.model[:MAX_TEXT]
        if record.version:
            fields["version"] = record.version
    if record.id:
        fields["id"] = record.id[:MAX_TEXT]
    if record.side:
        fields["rollout"] = record.side
    if record.error:
        fields["error"] = record.error[:MAX_TEXT]
    if record.span is not None:
        fields["trace_id"] = f"{record.span.trace.id:032x}"
    fields["request_bytes"] = record.request_bytes
    fields["response_bytes"] = record.response_bytes
    fields["duration_us"] = (record.ended_ns - record.started_ns) // 1000
    timing = record.timing
    if timing is not None:
        compute_ns = timing.compute_input_ns + timing.compute_infer_ns + timing.compute_output_ns
        fields["queue_us"] = timing.queue_ns // 1000
        fields["compute_us"] = compute_ns // 1000
        fields["batch_size"] = timing.batch_size
        if timing.cache_hit_ns:
            fields["cache"] = "hit"
    if worker is not None:
        fields["worker"] = worker
    try:
        made = orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a lone surrogate
        made = dump(fields)
    if not made.isascii():
        made = dump(fields)
    return made if len(made) <= select.PIPE_BUF else dump({k: _plain(v) for k, v in fields.items()})


def _plain(value: Any) -> Any:
    """Replace the characters of a text that JSON escapes at length."""
    if not isinstance(value, str):
        return value
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in value)
