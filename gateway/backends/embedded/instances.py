"""Instances of a blocking runtime: threads that run requests, and a bounded queue before them.

All runtimes that block (ONNX Runtime, PyTorch, TensorFlow, LiteRT) run behind it. A queued request
is dropped if its caller has gone or its deadline has passed when its turn comes. A running request
cannot be stopped, so its instance stays busy until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from modelport.gateway.errors import QueueFull, TimedOut, Unavailable
from modelport.gateway.repository.config import DEFAULT_MAX_QUEUE_SIZE
from modelport.gateway.runtime import thread_reply
from modelport.gateway.types import Answer, Deadline, InferRequest, InferResponse

Run = Callable[[InferRequest], InferResponse]

#: Shorter runs are made on the event loop itself. Handing a run to a thread and waking the loop
#: again costs about as much, for the request and for the loop.
INLINE_SECONDS = 100e-6
#: The same where the loop would have no other core meanwhile, and no batch could gather.
ONE_CORE_INLINE_SECONDS = 2e-3
#: If this many consecutive runs on the event loop exceed this time, every further run goes to a
#: thread. A single slow run may only have been preempted.
SLOW_INLINE_NS = 5_000_000
SLOW_IN_A_ROW = 3
NEVER = -1


@dataclass(slots=True)
class _WaitingRequest:
    """A request that waits for a thread.

    ``request`` holds it until one side takes it: a thread to run it, or its cancelled caller.
    """

    request: list[InferRequest]
    reply: asyncio.Future[InferResponse]
    deadline: Deadline
    queued_ns: int


class Instances:
    """``count`` threads that call ``run``, behind a queue of at most ``max_queue_size`` requests.

    It has its own threads, because an executor's locks and futures cost several times as much.
    """

    def __init__(
        self,
        run: Run,
        name: str,
        count: int,
        max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE,
    ) -> None:
        self._run = run
        self._limit = count + max_queue_size
        self._name, self._count = name, count
        self._threads: list[threading.Thread] = []  # started by the first request that needs one
        self._jobs: queue.SimpleQueue[_WaitingRequest | None] = queue.SimpleQueue()
        # Requests passed to the threads and not finished; only the event loop changes it.
        self._pending = 0
        self._inline_elements = NEVER
        self._slow_in_a_row = 0
        self._closed = False

    def allow_inline(self, elements: int) -> None:
        """Run requests of at most ``elements`` input elements on the event loop."""
        self._inline_elements = elements

    def inline(self, request: InferRequest) -> bool:
        """Whether the request would run on the event loop now."""
        if self._pending or self._inline_elements == NEVER or request.signature:
            return False  # the run time of another signature is unknown
        elements = 0
        for tensor in request.inputs:
            elements += tensor.data.size
        return elements <= self._inline_elements

    def __call__(self, request: InferRequest, deadline: Deadline) -> Answer:
        if deadline.expired:
            raise TimedOut
        if self.inline(request):
            response = self._run(request)
            if request.timing.compute_infer_ns <= SLOW_INLINE_NS:
                self._slow_in_a_row = 0
                return response
            self._slow_in_a_row += 1
            if self._slow_in_a_row == SLOW_IN_A_ROW:
                self._inline_elements = NEVER  # the run time depends on more than the size
            return response
        return self._queued(request, deadline)

    async def _queued(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        if self._closed:
            raise Unavailable("the model is unloaded")
        if self._pending >= self._limit:
            raise QueueFull
        reply: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
        self._pending += 1
        job = _WaitingRequest([request], reply, deadline, time.perf_counter_ns())
        if not self._threads:
            self._begin()
        self._jobs.put(job)
        try:
            return await reply
        except asyncio.CancelledError:
            if _take(job) is not None:  # not started: free its place in the queue and its tensors
                self._pending -= 1
            raise

    def _begin(self) -> None:
        for number in range(self._count):
            thread = threading.Thread(
                target=self._serve, name=f"{self._name}_{number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            request = _take(job)
            if request is not None:
                self._work(job, request)
            del job, request  # do not keep them alive while waiting

    def _work(self, job: _WaitingRequest, request: InferRequest) -> None:
        result: InferResponse | BaseException
        if job.reply.done() or job.deadline.expired:
            result = TimedOut()
        else:
            now_ns = time.perf_counter_ns()
            request.timing.queue_ns += now_ns - job.queued_ns
            request.timing.begun = True
            if request.span is not None:
                request.span.child("queue", job.queued_ns, now_ns)
            try:
                result = self._run(request)
            except BaseException as error:  # re-raised in the caller
                result = error
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            job.reply.get_loop().call_soon_threadsafe(self._finish, job.reply, result)

    def _finish(
        self, reply: asyncio.Future[InferResponse], result: InferResponse | BaseException
    ) -> None:
        self._pending -= 1
        thread_reply.settle(reply, result)

    def close(self) -> None:
        """Drop queued requests and wait for running ones."""
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()


def _take(job: _WaitingRequest) -> InferRequest | None:
    """Take the request, unless the other side has; ``list.pop`` is atomic between threads."""
    try:
        return job.request.pop()
    except IndexError:
        return None
