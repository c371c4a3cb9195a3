"""Triton's trace files: timestamps and tensors of requests, as a JSON array.

``qa/common/trace_summary.py`` of Triton reads them.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

from modelport.gateway.telemetry.request_record import GRPC, RequestRecord
from modelport.gateway.telemetry.spans import Span
from modelport.gateway.types import Tensor

log = structlog.get_logger("modelport.telemetry")

#: Traces that wait for the end of the gateway or for ``log_frequency``; further ones are dropped.
MAX_WAITING = 100_000


class TraceFile:
    """The files of one process: ``path`` at its end, or ``path.0``, ``path.1`` ... before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._indexes, self._ids = itertools.count(), itertools.count(1)
        self._waiting: list[dict[str, Any]] = []
        self._traces = 0
        self.dropped = 0

    def add(self, record: RequestRecord, log_frequency: int, is_last: bool) -> None:
        """Add the trace of a request, and write a file if it is complete."""
        if self._traces >= MAX_WAITING:
            self.dropped += 1
        else:
            self._traces += 1
            self._waiting += self._rows(record)
        if is_last or (log_frequency and self._traces >= log_frequency):
            path = self._path.with_name(f"{self._path.name}.{next(self._indexes)}")
            rows, self._waiting, self._traces = self._waiting, [], 0
            # A thread, so that no request waits for the disk.
            threading.Thread(target=_write, args=(path, rows), name="trace file").start()

    def close(self) -> None:
        """Write what is left to the file without an index."""
        if self._waiting:
            _write(self._path, self._waiting)

    def _rows(self, record: RequestRecord) -> Iterator[dict[str, Any]]:
        assert record.span is not None
        trace = record.span.trace
        root, *below = trace.spans
        number = next(self._ids)
        first: dict[str, Any] = {
            "id": number, "model_name": record.model, "model_version": record.version,
        }  # fmt: skip
        if record.id:
            first["request_id"] = record.id
        yield first
        kind = "GRPC" if record.protocol == GRPC else "HTTP"
        received = f"{kind}_WAITREAD" if record.protocol == GRPC else f"{kind}_RECV"
        decoded = next((each for each in below if each.name == "decode"), root)
        begun, done = decoded.ended_ns or root.started_ns, trace.answered_ns or record.ended_ns
        yield _at(number, f"{received}_START", root.started_ns)
        yield _at(number, f"{received}_END", begun)
        yield from _execution(number, root, below, begun, done)
        yield from self._steps(number, below)
        yield _at(number, "INFER_RESPONSE_COMPLETE", done)
        yield _at(number, f"{kind}_SEND_START", done)
        yield _at(number, f"{kind}_SEND_END", record.ended_ns)
        activities = ("TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT")
        for activity, tensors in zip(activities, trace.tensors or (), strict=False):
            for tensor in tensors:
                yield {"id": number, "activity": activity, "tensor": _described(tensor)}

    def _steps(self, parent: int, spans: list[Span]) -> Iterator[dict[str, Any]]:
        """The traces of the models of an ensemble's or a pipeline's steps."""
        for step in spans:
            if step.name == "step":
                number = next(self._ids)
                model = step.attributes["modelport.step_model"]
                yield {"id": number, "model_name": model, "model_version": 1, "parent_id": parent}
                ended = step.ended_ns or step.started_ns
                yield from _execution(number, step, spans, step.started_ns, ended)


def _execution(
    number: int, span: Span, spans: list[Span], begun: int, done: int
) -> Iterator[dict[str, Any]]:
    own = [each for each in spans if each.parent_id == span.id]
    queue = next((each for each in own if each.name == "queue"), None)
    compute = next((each for each in own if each.name in ("compute", "attempt")), None)
    yield _at(number, "REQUEST_START", begun)
    yield _at(number, "QUEUE_START", queue.started_ns if queue else begun)
    if compute is not None:
        ended = compute.ended_ns or done
        yield _at(number, "COMPUTE_START", queue.ended_ns if queue else compute.started_ns)
        yield _at(number, "COMPUTE_INPUT_END", compute.started_ns)
        yield _at(number, "COMPUTE_OUTPUT_START", ended)
        yield _at(number, "COMPUTE_END", max(ended, done))
    yield _at(number, "REQUEST_END", done)


def _described(tensor: Tensor) -> dict[str, str]:
    values = tensor.data.reshape(-1).tolist()
    texts = (v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in values)
    return {
        "name": tensor.name,
        "data": ",".join(texts),
        "shape": ",".join(map(str, tensor.data.shape)),
        "dtype": tensor.datatype,
    }


def _at(number: int, name: str, ns: int) -> dict[str, Any]:
    return {"id": number, "timestamps": [{"name": name, "ns": ns}]}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    try:
        with path.open("w") as file:
            file.write("[" + ",".join(json.dumps(row) for row in rows) + "]")
    except OSError as error:
        log.error("a trace file cannot be written", file=str(path), reason=error.strerror)
