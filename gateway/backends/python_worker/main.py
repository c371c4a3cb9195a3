"""The life of a worker: load the model, answer requests one batch after the other, end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import triton_python_backend_utils._runtime as utils_runtime
from modelport.gateway.errors import ModelportError
from triton_python_backend_utils._errors import TritonError
from triton_python_backend_utils._requests import (
    InferenceRequest,
    InferenceResponse,
    InferenceTrace,
    RequestOrigin,
)
from triton_python_backend_utils._tensors import Tensor

from . import frames
from .channel import WINDOW, Channel
from .errors import CODES, text_of
from .frames import MAX_TEXT, Frame
from .regions import Buffer
from .runtime import CURRENT, WorkerRuntime
from .tensors import describe, restore
from .triton_model import Answer, Rescheduled, TritonPythonModelAdapter, is_plain

#: A check of readiness takes no longer.
_CHECK_SECONDS = 5.0
_CANCELLED = TritonError("the request was cancelled", TritonError.CANCELLED)


def run(stream: socket.socket) -> None:
    """Serve one instance until the gateway says that it is enough."""
    channel = Channel(stream)
    os.register_at_fork(after_in_child=channel.close)
    channel.wait(lambda: bool(channel.inbox))
    start = json.loads(channel.inbox.popleft().meta)
    try:
        worker = _load(channel, start)
    except BaseException as error:
        text = str(error) if is_plain(error) else text_of(error, start["folder"])
        channel.send(frames.FAILED, 0, 0, text)
        return
    if worker.model.asynchronous:
        asyncio.run(worker.serve_async(stream))
    else:
        worker.serve()


def _load(channel: Channel, start: dict[str, Any]) -> Worker:
    runtime = WorkerRuntime(channel, start["instance"], start["folder"])
    utils_runtime.Current.runtime = runtime
    model = TritonPythonModelAdapter(start)
    channel.send(frames.CONFIGURED, 0, 0, model.complete(start["config"]))
    channel.wait(lambda: bool(channel.inbox))
    arguments = json.loads(channel.inbox.popleft().meta)
    runtime.initializing = True
    model.initialize(arguments)
    gc.freeze()  # a full collection would visit all that was imported: 300 ms with TensorFlow
    outputs = [each["name"] for each in json.loads(arguments["model_config"]).get("output", ())]
    runtime.flush_metrics()
    runtime.serving = True
    concurrent = frames.CONCURRENT if model.concurrent else 0
    channel.send(frames.READY, 0, concurrent | (frames.CHECKS if model.checks else 0))
    return Worker(channel, runtime, model, start, outputs)


@functools.lru_cache(256)
def _parsed(meta: bytes) -> Any:
    """The JSON of a request without texts of its own, which others repeat."""
    return json.loads(meta)


class Worker(RequestOrigin):
    """Answers the requests of one instance; the origin of those requests."""

    def __init__(
        self,
        channel: Channel,
        runtime: WorkerRuntime,
        model: TritonPythonModelAdapter,
        start: dict[str, Any],
        outputs: Sequence[str],
    ) -> None:
        self._channel, self._runtime, self.model = channel, runtime, model
        self._folder: str = start["folder"]
        self._failed = f"Failed to process the request(s) for model '{start['instance']}', message:"
        self._outputs = set(outputs)
        self.decoupled = model.decoupled
        #: The outputs that requests with a sender want, until the sender sends the end.
        self._wanted: dict[int, set[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: The numbers of the requests that a task answers, if it ends when nobody waits for them.
        self._interruptible: dict[asyncio.Task[Any], set[int]] = {}

    # -- the loop ---------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer requests in this thread."""
        channel = self._channel
        inbox = channel.inbox
        while True:
            channel.wait(lambda: bool(inbox))
            frame = inbox.popleft()
            if frame.kind == frames.INFER:
                self._execute(frame)
            elif frame.kind == frames.CHECK:  # requests go on meanwhile, as in Triton
                check = functools.partial(asyncio.run, self._check(frame, self.model.is_ready))
                threading.Thread(target=check, daemon=True).start()
            else:
                asyncio.run(self._finalize())
                return

    async def serve_async(self, stream: socket.socket) -> None:
        """Answer requests by a model with ``async def execute``, on this loop.

        A ``concurrent`` model works on several batches at once.
        """
        channel = self._channel
        loop = channel.loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        channel.arrived, channel.abandoned = arrived.set, self._interrupt
        loop.add_reader(stream.fileno(), channel.poll)
        while True:
            while not channel.inbox:
                arrived.clear()
                await arrived.wait()
            frame = channel.inbox.popleft()
            if frame.kind == frames.INFER and self.model.concurrent:
                self._start(self._execute_async(frame))
            elif frame.kind == frames.INFER:
                await self._execute_async(frame)
            elif frame.kind == frames.CHECK:
                check = functools.partial(asyncio.to_thread, self.model.is_ready)
                self._start(self._check(frame, check))
            else:
                await self._finalize()
                return

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check(self, frame: Frame, check: Callable[[], Any]) -> None:
        """Answer a question for readiness."""
        ready = False
        with contextlib.suppress(BaseException):
            answer = check()
            while inspect.isawaitable(answer):
                answer = await asyncio.wait_for(answer, _CHECK_SECONDS)
            ready = answer is True
        self._channel.send(frames.CHECKED, frame.number, int(ready))

    async def _finalize(self) -> None:
        self._runtime.serving = False
        try:
            answer = self.model.finalize()
            if inspect.isawaitable(answer):
                await answer
        except BaseException as error:
            self._runtime.log("INFO", f"finalize: {text_of(error, self._folder)}", "model.py", 0)
        self._runtime.flush_metrics()

    # -- one batch --------------------------------------------------------------------------------

    def _execute(self, frame: Frame) -> None:
        started = time.perf_counter_ns()
        requests, waiting = self._received(frame)
        answers: list[Answer] = []
        if waiting:
            self._runtime.executing = True
            try:
                answers = self._answers(waiting)
            except BaseException as error:  # also sys.exit(): an error of the request
                alone = self.model.may_separate(waiting, error)
                answers = [self._answer_alone(request) if alone else self._error(error)
                           for request in waiting]  # fmt: skip
            finally:
                self._runtime.executing = False
        self._finish(frame, requests, waiting, answers, time.perf_counter_ns() - started)

    def _answers(self, waiting: list[InferenceRequest]) -> list[Answer]:
        returned = self.model.execute(waiting)
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        return self.model.answers(waiting, returned)

    def _answer_alone(self, request: InferenceRequest) -> Answer:
        try:
            return self._answers([request])[0]
        except BaseException as error:
            return self._error(error)

    async def _execute_async(self, frame: Frame) -> None:
        started = time.perf_counter_ns()
        requests, waiting = self._received(frame)
        answers: list[Answer] = []
        task = asyncio.current_task()
        assert task is not None
        if self.model.interruptible:
            self._interruptible[task] = {each.number for each in waiting}
        if waiting:
            try:
                answers = await self._answers_async(waiting)
            except BaseException as error:
                stopped = isinstance(error, asyncio.CancelledError) and task.cancelling()
                if stopped and not self._is_abandoned(task):
                    raise
                answers = [_CANCELLED if stopped else self._error(error)] * len(waiting)
        self._interruptible.pop(task, None)
        self._finish(frame, requests, waiting, answers, time.perf_counter_ns() - started)

    async def _answers_async(self, waiting: list[InferenceRequest]) -> list[Answer]:
        try:
            return self.model.answers(waiting, await self.model.execute(waiting))
        except Exception as error:
            if not self.model.may_separate(waiting, error):
                return [self._error(error)] * len(waiting)
        return [each for request in waiting for each in await self._answers_async([request])]

    def _interrupt(self, number: int) -> None:
        """Cancel the task that answers a request if nobody waits for any of its requests."""
        for task, numbers in self._interruptible.items():
            if number in numbers and self._is_abandoned(task):
                task.cancel()

    def _is_abandoned(self, task: asyncio.Task[Any]) -> bool:
        return self._interruptible.get(task, {0}) <= self._channel.cancelled

    def _error(self, error: BaseException) -> TritonError:
        if isinstance(error, ModelportError):
            return TritonError(str(error), CODES.get(error.code, TritonError.INTERNAL))
        text = str(error) if is_plain(error) else text_of(error, self._folder)
        return TritonError(f"{self._failed} {text}")

    def _failure(self, error: BaseException) -> Any:
        """The JSON of an answer that cannot be sent."""
        return [1, self._error(error).message()[:MAX_TEXT], TritonError.INTERNAL]

    def _received(self, frame: Frame) -> tuple[list[InferenceRequest], list[InferenceRequest]]:
        """The requests of a batch, whose numbers follow each other, and those not cancelled."""
        CURRENT.set(frame.number)
        plain = len(frame.meta) <= 1024
        rows = _parsed(frame.meta) if plain else json.loads(frame.meta)
        requests, offset = [], 0
        for number, (inputs, outputs, extra) in enumerate(rows, frame.number):
            tensors, offset = restore(inputs, frame.content, offset)
            requests.append(self._request(number, tensors, outputs, extra))
        cancelled = self._channel.cancelled
        return requests, [each for each in requests if each.number not in cancelled]

    def _request(
        self, number: int, inputs: list[Tensor], outputs: list[str] | None, extra: Any
    ) -> InferenceRequest:
        request = InferenceRequest.__new__(InferenceRequest)
        request._inputs = inputs
        request._outputs = set(outputs) if outputs else self._outputs
        request._request_id, request._correlation_id, request._flags = "", 0, 0
        request._timeout, request._parameters, request._trace = 0, "{}", _NO_TRACE
        request._model_name, request._model_version = "", -1
        request._release_flags, request._preferred_memory = 1, None
        if extra is not None:
            request._request_id, request._correlation_id, request._flags, request._timeout = extra[
                :4
            ]
            request._parameters, trace = extra[4:]
            request._trace = InferenceTrace(trace) if trace else _NO_TRACE
        request.number, request.origin, request.sender = number, self, None
        return request

    def _finish(
        self,
        frame: Frame,
        requests: Sequence[InferenceRequest],
        waiting: Sequence[InferenceRequest],
        answers: Sequence[Answer],
        nanoseconds: int,
    ) -> None:
        """Send the answers of a batch; those of senders come later."""
        if len(waiting) < len(requests):
            by_request = dict(zip(waiting, answers, strict=True))
            answers = [by_request.get(request, _CANCELLED) for request in requests]
        metas: list[Any] = []
        buffers: list[Buffer] = []
        again = True
        for request, answer in zip(requests, answers, strict=True):
            if answer is not None:
                self._end(request.number, request.sender)
            packed = self._packed(answer, request._outputs, buffers)
            again = again and type(packed) is tuple
            metas.append(packed)
            request.sender = None  # the model may hold it
        self._runtime.flush_metrics()
        try:
            meta = tuple(metas) if again else metas
            self._channel.send(frames.RESULT, frame.number, nanoseconds, meta, buffers)
        except Exception as error:
            failures = [self._failure(error)] * len(metas)
            self._channel.send(frames.RESULT, frame.number, nanoseconds, failures)

    def _packed(self, answer: Answer, wanted: set[str], buffers: list[Buffer]) -> Any:
        """The JSON of an answer, whose tensors follow those in ``buffers``.

        It is a tuple if it may come again: it has no texts of its own.
        """
        if answer is None:
            return None
        if isinstance(answer, Rescheduled):
            return (2,)
        try:
            if isinstance(answer, InferenceResponse):
                tensors = [each for each in answer._outputs if each._name in wanted]
                rows, contents = describe(tensors)
                buffers += contents
                if answer._parameters == "{}":
                    return 0, rows, None
                return [0, rows, json.loads(answer._parameters)]
            message, code = answer.message(), answer.code()
            if type(code) is int and 0 <= code <= TritonError.CANCELLED:
                return [1, str(message)[:MAX_TEXT], code]
            return [1, str(message)[:MAX_TEXT], TritonError.INTERNAL]
        except Exception as error:  # an object of the model's own in a tensor of strings
            return [1, f"{self._failed} {text_of(error, self._folder)}", TritonError.INTERNAL]

    def _end(self, number: int, sender: Any) -> None:
        if sender is not None:
            sender.close()
        self._wanted.pop(number, None)
        self._channel.credits.pop(number, None)
        self._channel.cancelled.discard(number)

    # -- the origin of requests ------------------------------------------------------------------

    def sender(self, request: InferenceRequest) -> Any:
        self._wanted[request.number] = request._outputs
        self._channel.credits[request.number] = WINDOW
        return super().sender(request)

    def is_cancelled(self, number: int) -> bool:
        self._channel.poll()
        return number in self._channel.cancelled

    def is_blocked(self, number: int) -> bool:
        channel = self._channel
        return channel.credits.get(number, 1) <= 0 and number not in channel.cancelled

    def send(self, number: int, response: InferenceResponse | None, final: bool) -> None:
        wanted, channel = self._wanted.get(number), self._channel
        if wanted is None:
            return  # the batch has ended by an error
        cancelled = channel.cancelled
        if self.decoupled and response is not None:
            # A reader that is slow slows the model down, instead of filling memory.
            channel.wait(lambda: not self.is_blocked(number))
            if number in channel.credits:
                channel.credits[number] -= 1
        meta: Any = None
        buffers: list[Buffer] = []
        if response is not None and number not in cancelled:
            meta = self._packed(response.error() or response, wanted, buffers)
        if final:
            self._end(number, None)
        self._runtime.flush_metrics()
        value = frames.FINAL if final else 0
        try:
            channel.send(frames.RESPONSE, number, value, meta, buffers)
        except Exception as error:  # a parameter that is no JSON, or too little memory
            channel.send(frames.RESPONSE, number, value, self._failure(error))

    def forget(self, number: int, answered: bool) -> None:
        if number not in self._wanted:
            return
        self._end(number, None)
        failure = None
        if not answered or self.decoupled:
            text = "the model has dropped the sender of the request without sending its end"
            failure = [1, f"{self._failed} {text}", TritonError.INTERNAL]
        self._channel.send_late(frames.RESPONSE, number, frames.FINAL, failure)


_NO_TRACE = InferenceTrace()


def main(descriptor: int) -> None:
    """Serve on the socket of a descriptor."""
    stream = socket.socket(fileno=descriptor)
    stream.set_inheritable(False)
    run(stream)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the model may go on
