"""The functions of ``triton_python_backend_utils`` in a worker: other models, logs, metrics."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

from triton_python_backend_utils._errors import TritonError, TritonModelException
from triton_python_backend_utils._requests import InferenceRequest, InferenceResponse
from triton_python_backend_utils._runtime import BLS_REFUSED, Runtime

from . import frames
from .channel import CallReplies, Channel
from .frames import LOG_MARK, MAX_TEXT, Frame
from .tensors import describe, restore

#: The number of the request that the model works on; 0: none is known.
CURRENT: contextvars.ContextVar[int] = contextvars.ContextVar("request", default=0)


class WorkerRuntime(Runtime):
    """The runtime of one instance."""

    def __init__(self, channel: Channel, instance: str, folder: str) -> None:
        self._channel, self._instance = channel, instance
        self.model_dir = folder
        #: Whether the model may control other models, and whether it may call them.
        self.initializing = self.serving = False
        #: Changes of metrics since the last frame: family, labels, operation → value.
        self._changes: dict[tuple[str, tuple[tuple[str, str], ...], str], float] = {}
        #: Whether changes wait for the end of ``execute``.
        self.executing = False

    # -- logs -------------------------------------------------------------------------------------

    def log(self, level: str, message: str, file: str, line: int) -> None:
        row = json.dumps([level, message[:MAX_TEXT], file, line])
        sys.stderr.write(f"{LOG_MARK}{row}\n")
        sys.stderr.flush()

    # -- requests to other models -----------------------------------------------------------------

    def infer(self, request: InferenceRequest) -> InferenceResponse:
        number, call = self._call(request, decoupled=False)
        try:
            self._channel.wait(lambda: bool(call.replies))
        finally:
            self._channel.end_call(number)
        return _response(call.replies.popleft())

    async def infer_async(self, request: InferenceRequest) -> InferenceResponse:
        number, call = self._call(request, decoupled=False)
        await self._first(number, call)
        self._channel.end_call(number)
        return _response(call.replies.popleft())

    def stream(self, request: InferenceRequest) -> Iterator[InferenceResponse]:
        number, call = self._call(request, decoupled=True)
        return self._responses(number, call)

    async def stream_async(self, request: InferenceRequest) -> Iterator[InferenceResponse]:
        number, call = self._call(request, decoupled=True)
        await self._first(number, call)
        return self._responses(number, call)

    async def _first(self, number: int, call: CallReplies) -> None:
        """Wait for the first reply to a call, or end the call if the waiting task is cancelled."""
        loop, reads = asyncio.get_running_loop(), self._channel.loop
        try:
            if reads is loop:
                arrived = asyncio.Event()
                call.arrived = lambda: loop.call_soon_threadsafe(arrived.set)
                if not call.replies:
                    await arrived.wait()
                call.arrived = None
            else:  # a thread reads the socket, because the loop does not
                await loop.run_in_executor(None, self._channel.wait, lambda: bool(call.replies))
        except asyncio.CancelledError:
            # The thread needs the reply for its own end, without which the loop has none either.
            call.arrived = functools.partial(self._drop, number)
            if reads is loop or call.replies:
                self._drop(number)
            raise

    def _drop(self, number: int) -> None:
        self._channel.send(frames.CALL_END, number)
        self._channel.end_call(number)

    def _responses(self, number: int, call: CallReplies) -> Iterator[InferenceResponse]:
        try:
            while True:
                self._channel.wait(lambda: bool(call.replies))
                frame = call.replies.popleft()
                if frame.meta:
                    yield _response(frame)
                if frame.value & frames.FINAL:
                    return
                self._channel.send(frames.CALL_NEXT, number)
        finally:
            if not call.finished:
                self._channel.send(frames.CALL_END, number)
            self._channel.end_call(number)

    def _call(self, request: InferenceRequest, decoupled: bool) -> tuple[int, CallReplies]:
        if not self.serving:
            raise TritonModelException(BLS_REFUSED)
        rows, buffers = describe(request.inputs())
        outputs = sorted(request.requested_output_names())
        meta = [
            CURRENT.get(), request.model_name(), request.model_version(), rows, outputs,
            request.request_id(), request.correlation_id(), request.flags(), request.timeout(),
            request.parameters(), decoupled,
        ]  # fmt: skip
        try:
            return self._channel.call(frames.CALL, meta, buffers)
        except (ValueError, TypeError) as error:
            raise TritonModelException(f"The request cannot be sent: {error}") from error

    def control(self, operation: str, content: bytes = b"", **arguments: Any) -> Any:
        if not self.initializing:
            raise TritonModelException(BLS_REFUSED)
        return self._asked(operation, arguments, content)

    def _asked(self, operation: str, arguments: dict[str, Any], content: bytes = b"") -> Any:
        buffers = (content,) if content else ()
        number, call = self._channel.call(frames.CONTROL, [operation, arguments], buffers)
        try:
            self._channel.wait(lambda: bool(call.replies))
        finally:
            self._channel.end_call(number)
        result, error = json.loads(call.replies.popleft().meta)
        if error:
            raise TritonModelException(error)
        return result

    # -- metrics ----------------------------------------------------------------------------------

    def declare_metrics(self, name: str, description: str, kind: str) -> None:
        arguments = {"name": name, "description": description[:MAX_TEXT], "kind": kind}
        self._asked("metrics", arguments)

    def update_metric(
        self, family: str, labels: tuple[tuple[str, str], ...], operation: str, value: float
    ) -> None:
        if not math.isfinite(value):
            raise TritonModelException(f"a metric cannot change by {value}")
        key = family, labels, operation
        # Setting a gauge makes earlier changes void, and later ones must follow it.
        if operation == "set":
            self._changes.pop((family, labels, "increment"), None)
            self._changes[key] = value
        elif operation == "increment" and (family, labels, "set") in self._changes:
            self._changes[family, labels, "set"] += value
        else:
            self._changes[key] = self._changes.get(key, 0.0) + value
            if operation.startswith("observe"):
                count = family, labels, operation.replace("observe", "count")
                self._changes[count] = self._changes.get(count, 0.0) + 1
        if not self.executing:
            self.flush_metrics()

    def metric_value(self, family: str, labels: tuple[tuple[str, str], ...]) -> float | None:
        self.flush_metrics()
        found = self._asked("metric", {"name": family, "labels": dict(labels)})
        return float(found)

    def flush_metrics(self) -> None:
        """Send the changes of metrics."""
        while self._changes:
            keys = list(self._changes)[:256]
            rows = [[*key, self._changes.pop(key)] for key in keys]
            self._channel.send(frames.METRICS, 0, 0, rows)


def _response(frame: Frame) -> InferenceResponse:
    kind, *rest = json.loads(frame.meta)
    if kind:
        message, code, *reason = rest
        error = TritonError(message, code)
        error.reason = tuple(reason)
        return InferenceResponse([], error)
    tensors, _ = restore(rest[0], frame.content)
    return InferenceResponse(tensors, None, rest[1])
