"""Instances of a blocking runtime: threads that run requests, and a bounded queue before them.

Whatever computes without awaiting (ONNX Runtime, PyTorch, TensorFlow, LiteRT) is put behind this.
A request whose caller has gone, or whose deadline has passed, is dropped when its turn comes; one
that already runs cannot be stopped, so its instance stays busy until it ends.
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
from modelport.gateway.types import Deadline, InferRequest, InferResponse

Run = Callable[[InferRequest], InferResponse]

#: Requests waiting per model version. With ``dynamic_batching`` they wait in the batcher instead.
MAX_QUEUE_SIZE = 4096
#: A run below this is made on the event loop itself. Handing it to a thread and waking the loop
#: again costs about as much, for the request and for the loop.
INLINE_SECONDS = 100e-6
#: After so many runs in a row on the event loop that took longer than this, every further one goes
#: to a thread. One alone may only have been preempted.
SLOW_INLINE_NS = 5_000_000
SLOW_IN_A_ROW = 3
NEVER = -1


@dataclass(slots=True)
class _Job:
    """What waits for a thread. ``request`` holds it until somebody takes it: a thread, to run it,
    or the caller, who has gone. Only one of them gets it.
    """

    request: list[InferRequest]
    reply: asyncio.Future[InferResponse]
    loop: asyncio.AbstractEventLoop
    deadline: Deadline
    queued_ns: int


class Instances:
    """``count`` threads over ``run``; at most ``max_queue_size`` requests wait.

    The threads are this class' own: an executor's locks and futures are several times a hand-over.
    """

    def __init__(
        self, run: Run, name: str, count: int, max_queue_size: int = MAX_QUEUE_SIZE
    ) -> None:
        self._run = run
        self._limit = count + max_queue_size
        self._name, self._count = name, count
        self._threads: list[threading.Thread] = []  # from the first request on that needs one
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # Requests handed to the threads and not yet finished; the event loop alone changes it.
        self._pending = 0
        self._inline_elements = NEVER
        self._slow_in_a_row = 0
        self._closed = False

    def allow_inline(self, elements: int) -> None:
        """Run requests of at most ``elements`` input elements on the event loop."""
        self._inline_elements = elements

    def inline(self, request: InferRequest) -> bool:
        """Whether it would run on the event loop, now."""
        if self._pending or self._inline_elements == NEVER or request.signature:
            return False  # the time that another signature takes is not known
        elements = 0
        for tensor in request.inputs:
            elements += tensor.data.size
        return elements <= self._inline_elements

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        if deadline.expired:
            raise TimedOut
        if self.inline(request):
            response = self._run(request)
            if request.timing.compute_infer_ns <= SLOW_INLINE_NS:
                self._slow_in_a_row = 0
                return response
            self._slow_in_a_row += 1
            if self._slow_in_a_row == SLOW_IN_A_ROW:
                self._inline_elements = NEVER  # its time depends on more than its size
            return response
        if self._closed:
            raise Unavailable("the model is unloaded")
        if self._pending >= self._limit:
            raise QueueFull
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[InferResponse] = loop.create_future()
        self._pending += 1
        job = _Job([request], reply, loop, deadline, time.perf_counter_ns())
        if not self._threads:
            self._begin()
        self._jobs.put(job)
        try:
            return await reply
        except asyncio.CancelledError:
            if _take(job) is not None:  # it had not begun: its place and its tensors are free
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
            del job, request  # not to be kept while it waits

    def _work(self, job: _Job, request: InferRequest) -> None:
        result: InferResponse | BaseException
        if job.reply.done() or job.deadline.expired:
            result = TimedOut()
        else:
            request.timing.queue_ns += time.perf_counter_ns() - job.queued_ns
            try:
                result = self._run(request)
            except BaseException as error:  # crosses to the caller, whatever it is
                result = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            job.loop.call_soon_threadsafe(self._finish, job.reply, result)

    def _finish(
        self, reply: asyncio.Future[InferResponse], result: InferResponse | BaseException
    ) -> None:
        self._pending -= 1
        if reply.done():
            return
        if isinstance(result, BaseException):
            reply.set_exception(result)
        else:
            reply.set_result(result)

    def close(self) -> None:
        """Drop what waits, and return when what runs has ended."""
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()


def _take(job: _Job) -> InferRequest | None:
    """The request, for the first who asks; between threads, ``list.pop`` decides who that is."""
    try:
        return job.request.pop()
    except IndexError:
        return None
