"""The recorder: samples requests, and has a thread write their records.

Requests only append to a bounded queue. What finds no place there, and what cannot be written, is
dropped and counted; no request waits or fails for it.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import partial

import structlog
from prometheus_client.core import CounterMetricFamily, Metric

from modelport.gateway.recording.record_encryption import RecordCipher
from modelport.gateway.recording.record_files import FolderSink, ObjectSink, RecordSink, Written
from modelport.gateway.recording.record_format import Rules, encode, pattern
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.settings import RecordSettings
from modelport.gateway.telemetry.captured_traffic import CapturedTraffic
from modelport.gateway.telemetry.request_record import RequestRecord

log = structlog.get_logger("modelport.recording")

#: Requests, and bytes of their content, that wait for the thread.
MAX_WAITING, MAX_WAITING_BYTES = 10_000, 64 * 1024 * 1024
#: A record may wait this long for others, to be written with them.
LINGER_SECONDS = 0.2
#: Bytes that are written by one system call.
MOST_WRITE_BYTES = 1 << 18
#: Time for what still waits when the gateway stops.
CLOSE_SECONDS = 5.0


class Dropped(StrEnum):
    """The reasons for which a sampled request has no record."""

    QUEUE_FULL = "queue_full"
    TOO_LARGE = "too_large"
    NOT_WRITTEN = "not_written"


def sink_of(settings: RecordSettings) -> RecordSink:
    """Open the place of the records.

    Raises:
        Unavailable: It cannot be written.
    """
    if isinstance(settings.target, Location):
        return ObjectSink(settings.target, settings.rotate_bytes, settings.rotate_seconds)
    return FolderSink(
        settings.target, settings.rotate_bytes, settings.rotate_seconds, settings.max_bytes
    )


class RequestRecorder:
    """Records the traffic of one process.

    Args:
        sink: In place of the one of the settings.

    Attributes:
        sampled, written, dropped: Numbers of requests; the first is the sum of the others and of
            those that wait.
    """

    def __init__(
        self, settings: RecordSettings, worker: int | None = None, sink: RecordSink | None = None
    ) -> None:
        self._share, self._shares = settings.sample, settings.model_samples
        self._most_share = max((settings.sample, *settings.model_samples.values()))
        self._most_bytes = settings.max_record_bytes
        self._rules = Rules(
            tuple(map(pattern, settings.redact)), tuple(map(pattern, settings.hashed)),
            settings.hash_key, frozenset(each.lower().encode() for each in settings.headers),
        )  # fmt: skip
        self._cipher = RecordCipher(settings.key) if settings.key else None
        number = os.getpid() if worker is None else worker
        self._source = f"//{socket.gethostname()}/modelport/{number}"
        self._sink = sink_of(settings) if sink is None else sink
        self.sampled = self.written = 0
        #: Each reason is counted by one thread alone, as are the bytes put in and taken out.
        self.dropped = Counter(dict.fromkeys(Dropped, 0))
        self._put_bytes = self._taken_bytes = 0
        self._waiting: deque[tuple[RequestRecord, CapturedTraffic]] = deque()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    # -- the event loop ---------------------------------------------------------------------------

    def capture(self) -> CapturedTraffic | None:
        """Make the place for the content of a request, unless no model's share covers it."""
        draw = random.random()
        return CapturedTraffic(draw, self._most_bytes) if draw < self._most_share else None

    def record(self, record: RequestRecord, captured: CapturedTraffic) -> None:
        """Queue a request that has ended, without waiting."""
        if captured.draw >= self._shares.get(record.model, self._share):
            return
        if not record.model and not record.route().infers:
            return
        self.sampled += 1
        captured.is_sealed = True
        captured.fields = self._rules.recorded(record.fields)
        captured.size += len(captured.target) + sum(map(len, captured.fields.values()))
        waiting = self._put_bytes - self._taken_bytes
        if captured.is_too_large:
            self.dropped[Dropped.TOO_LARGE] += 1
        elif len(self._waiting) >= MAX_WAITING or waiting + captured.size > MAX_WAITING_BYTES:
            self.dropped[Dropped.QUEUE_FULL] += 1
        else:
            self._put_bytes += captured.size
            self._waiting.append((record, captured))
            if not self._wake.is_set():
                self._wake.set()

    def close(self) -> None:
        """Write the queued records and end the thread; give up on a sink that hangs."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)

    def families(self) -> Iterator[Metric]:
        """The metrics of the recorder."""
        yield CounterMetricFamily(
            "modelport_records_sampled", "Inference requests chosen to be recorded",
            value=self.sampled,
        )  # fmt: skip
        yield CounterMetricFamily(
            "modelport_records_written", "Records that were written", value=self.written
        )
        dropped = CounterMetricFamily(
            "modelport_records_dropped", "Chosen requests that have no record", labels=["reason"]
        )
        for reason in Dropped:
            dropped.add_metric([reason], self.dropped[reason])
        yield dropped

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(1.0)
            if self._waiting:
                self._closing.wait(LINGER_SECONDS)
            self._wake.clear()
            self._write_all()
            self._sunk(self._sink.tick)
        self._write_all()
        self._sunk(partial(self._sink.tick, closing=True))

    def _write_all(self) -> None:
        held: dict[str, list[bytes]] = {}
        size = 0
        while self._waiting:
            record, captured = self._waiting.popleft()
            try:
                line = encode(record, captured, self._rules, self._source)
                if self._cipher is not None:
                    line = self._cipher.encrypt(line)
            except Exception:
                log.exception("a record cannot be made", model=record.model)
                self.dropped[Dropped.NOT_WRITTEN] += 1
            else:
                held.setdefault(record.model, []).append(line)
                size += len(line)
            self._taken_bytes += captured.size
            if size >= MOST_WRITE_BYTES:
                self._write(held)
                held, size = {}, 0
        self._write(held)

    def _write(self, held: Mapping[str, list[bytes]]) -> None:
        for model, lines in held.items():
            self._sunk(partial(self._sink.write, model, lines), len(lines))

    def _sunk(self, work: Callable[[], Written], lines: int = 0) -> None:
        """Have the sink do some work, and count; an unforeseen error does not end the thread."""
        try:
            done = work()
        except Exception:
            log.exception("records cannot be written")
            done = Written(0, lines)
        self.written += done.written
        self.dropped[Dropped.NOT_WRITTEN] += done.lost
