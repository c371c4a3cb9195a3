"""Calls of a model to other models and to the server (BLS), on behalf of its worker."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import orjson

from modelport.gateway.backends.backend_host import Host
from modelport.gateway.backends.python import codec
from modelport.gateway.backends.python.codec import ModelAnswered
from modelport.gateway.backends.python.metrics import ModelMetrics
from modelport.gateway.backends.python.requests import PendingRequest
from modelport.gateway.backends.python_worker import frames
from modelport.gateway.backends.python_worker.frames import Frame, FrameError
from modelport.gateway.backends.python_worker.regions import Buffer
from modelport.gateway.errors import (
    Decoupled,
    Internal,
    InvalidArgument,
    ModelportError,
    NotFound,
)
from modelport.gateway.runtime.timer_wheel import within
from modelport.gateway.types import (
    NO_DEADLINE,
    Deadline,
    InferRequest,
    InferResponse,
    ModelFiles,
    Parameter,
    finished,
)

if TYPE_CHECKING:
    from modelport.gateway.backends.python.python_process import PythonProcess

#: Calls of one worker at a time.
MAX_CALLS = 1024
#: The requests that wait for the current one.
CALLERS: contextvars.ContextVar[tuple[PendingRequest, ...]] = contextvars.ContextVar(
    "callers", default=()
)
_DECOUPLED = (
    "Model {0} - Error when running inference: Model {0} is using the decoupled. The current BLS "
    "request call doesn't support models using the decoupled transaction policy. Please use "
    "'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled models.'"
)
#: A response without outputs.
_EMPTY = b"[0,[],null]"
_REFUSED = "Model {0} - Error when running inference: {1}"


class WorkerCalls:
    """The calls of one worker that are in progress. Belongs to the event loop."""

    def __init__(
        self,
        host: Host,
        worker: PythonProcess,
        metrics: ModelMetrics,
        find: Callable[[int], PendingRequest | None],
    ) -> None:
        self._host, self._worker, self._metrics, self._find = host, worker, metrics, find
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._wanted: dict[int, asyncio.Event] = {}

    def received(self, frame: Frame) -> None:
        """Begin, continue or end a call.

        Raises:
            FrameError: it is no call.
        """
        number = frame.number
        if frame.kind == frames.CALL_NEXT:
            if number in self._wanted:
                self._wanted[number].set()
        elif frame.kind == frames.CALL_END:
            if number in self._tasks:
                self._tasks[number].cancel()
        elif number in self._tasks or len(self._tasks) >= MAX_CALLS:
            raise FrameError("it has too many calls in progress")
        elif frame.kind == frames.CONTROL:
            self._begin(number, self._control(number, frame), None)
        else:
            self._call(frame)

    def _call(self, frame: Frame) -> None:
        try:
            parent, model, version, rows, outputs, *texts, decoupled = codec.parsed(frame.meta)
            inputs, _ = codec.tensors_of(codec.described_tensors(rows), frame.content, 0)
            request_id, correlation, flags, timeout, parameters = texts
            request = InferRequest(
                model, inputs, tuple(outputs), max(0, version), request_id,
                _parameters(correlation, flags, timeout, parameters),
            )  # fmt: skip
            caller = self._find(parent)
        except (TypeError, ValueError) as error:
            raise FrameError("a call is described wrongly") from error
        deadline = NO_DEADLINE
        if caller is not None:
            deadline = caller.deadline
            request.trace, request.caller = caller.request.trace, caller.request.caller
            request.span = caller.request.span
        answer = self._stream if decoupled else self._infer
        self._begin(frame.number, answer(frame.number, request, deadline), caller)

    def _begin(self, number: int, work: Any, caller: PendingRequest | None) -> None:
        context = contextvars.copy_context() if caller is None else caller.context.copy()
        if caller is not None:
            context.run(lambda: CALLERS.set((*CALLERS.get(), caller)))
        task = self._host.loop.create_task(work, context=context)
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._end(number))

    def _end(self, number: int) -> None:
        self._tasks.pop(number, None)
        self._wanted.pop(number, None)

    async def _infer(self, number: int, request: InferRequest, deadline: Deadline) -> None:
        try:
            answer = finished(self._host.infer(request, deadline))
            response = await within(answer, deadline)
        except Exception as error:
            self._failed(number, request.model_name, error)
        else:
            self._respond(number, response, final=True)

    async def _stream(self, number: int, request: InferRequest, deadline: Deadline) -> None:
        wanted = self._wanted[number] = asyncio.Event()
        responses: AsyncGenerator[InferResponse, None] = self._host.stream(request, deadline)
        ended = False
        try:
            async with aclosing(responses):
                async for response in responses:
                    ended = response.final
                    self._respond(number, response, final=False)
                    await wanted.wait()
                    wanted.clear()
        except Exception as error:
            self._failed(number, request.model_name, error)
        else:
            # As in Triton, an end that comes by itself is an empty response.
            meta = b"" if ended else _EMPTY
            self._worker.send(frames.pack(frames.REPLY, number, frames.FINAL, meta))

    def _respond(self, number: int, response: InferResponse, final: bool) -> None:
        buffers: list[Buffer] = []
        row = [0, codec.describe(response.outputs, buffers), dict(response.parameters) or None]
        value = frames.FINAL if final else 0
        meta, regions = orjson.dumps(row), self._worker.regions
        self._worker.send(frames.pack(frames.REPLY, number, value, meta, buffers, regions))

    def _failed(self, number: int, model: str, error: Exception) -> None:
        reason = error if isinstance(error, ModelportError) else Internal("the server has failed")
        row = codec.error_row(_bls_error(model, error), reason)
        self._worker.send(frames.pack(frames.REPLY, number, frames.FINAL, orjson.dumps(row)))

    async def _control(self, number: int, frame: Frame) -> None:
        result, problem = None, ""
        try:
            operation, arguments = codec.parsed(frame.meta)
            result = await self._controlled(operation, arguments, frame.content)
        except ModelportError as error:
            problem = str(error)
        except (TypeError, ValueError, LookupError, FrameError):
            problem = "the call is described wrongly"
        meta = orjson.dumps([result, problem])
        self._worker.send(frames.pack(frames.REPLY, number, frames.FINAL, meta))

    async def _controlled(self, operation: str, arguments: dict[str, Any], content: Any) -> Any:
        if operation == "metrics":
            self._metrics.declare(arguments["name"], arguments["description"], arguments["kind"])
            return None
        if operation == "metric":
            return self._metrics.value(arguments["name"], arguments["labels"])
        control = self._host.control
        if control is None:
            raise Internal("this server does not control models")
        model = arguments["model"]
        try:
            if operation == "load":
                contents = _files(arguments["files"], content)
                files = ModelFiles(contents, may_run_code=True) if contents else None
                await control.load(model, arguments["config"] or None, files=files)
            elif operation == "unload":
                await control.unload(model, bool(arguments["dependents"]))
            else:
                version = arguments["version"]
                await control.require_ready(model, int(version) if version else 0)
                return True
        except NotFound as error:
            if operation == "load":
                raise InvalidArgument(f"Failed to load model: {error}") from error
        except ModelportError as error:
            if operation != "ready":
                raise type(error)(f"Failed to {operation} model: {error}") from error
        return False

    def close(self) -> None:
        """Cancel all calls."""
        for task in list(self._tasks.values()):
            task.cancel()


def _parameters(
    correlation: Any, flags: Any, timeout: Any, parameters: str
) -> dict[str, Parameter]:
    found: dict[str, Parameter] = dict(orjson.loads(parameters))
    if correlation:
        found["sequence_id"] = correlation
    if flags & 1:
        found["sequence_start"] = True
    if flags & 2:
        found["sequence_end"] = True
    if timeout:
        found["timeout"] = timeout
    return found


def _files(rows: list[list[Any]], content: Any) -> dict[str, bytes]:
    """The files of ``load_model``, whose contents follow each other."""
    found, start = {}, 0
    for path, size in rows:
        found[str(path)] = bytes(content[start : start + size]) if size else b""
        start += size
    return found


def _bls_error(model: str, error: Exception) -> ModelportError:
    """The error of a call, in Triton's words."""
    if isinstance(error, ModelAnswered):
        return error
    if isinstance(error, Decoupled):
        return Internal(_DECOUPLED.format(model))
    if isinstance(error, NotFound | InvalidArgument):
        return Internal(_REFUSED.format(model, error))
    if isinstance(error, ModelportError):
        return error
    return Internal(_REFUSED.format(model, "the server has failed"))
