"""Instances of a blocking runtime: threads that run requests, and a bounded queue before them.

Whatever computes without awaiting (ONNX Runtime, PyTorch, TensorFlow, LiteRT) is put behind this.
A request whose caller has gone, or whose deadline has passed, is dropped when its turn comes; one
that already runs cannot be stopped, so its instance stays busy until it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gateway.errors import QueueFull, TimedOut
from gateway.types import Deadline, InferRequest, InferResponse

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
    """What an executor keeps until a thread is free, wanted or not."""

    request: InferRequest | None
    reply: asyncio.Future[InferResponse]
    loop: asyncio.AbstractEventLoop
    deadline: Deadline
    queued_ns: int


class Instances:
    """``count`` threads over ``run``; at most ``max_queue_size`` requests wait."""

    def __init__(
        self, run: Run, name: str, count: int, max_queue_size: int = MAX_QUEUE_SIZE
    ) -> None:
        self._run = run
        self._limit = count + max_queue_size
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=name)
        # Requests handed to the threads and not yet finished; the event loop alone changes it.
        self._pending = 0
        self._inline_elements = NEVER
        self._slow_in_a_row = 0

    def allow_inline(self, elements: int) -> None:
        """Run requests of at most ``elements`` input elements on the event loop."""
        self._inline_elements = elements

    def inline(self, request: InferRequest) -> bool:
        """Whether it would run on the event loop, now."""
        if self._pending or self._inline_elements == NEVER:
            return False
        return sum(t.data.size for t in request.inputs) <= self._inline_elements

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
        if self._pending >= self._limit:
            raise QueueFull
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[InferResponse] = loop.create_future()
        self._pending += 1
        job = _Job(request, reply, loop, deadline, time.perf_counter_ns())
        begun = self._executor.submit(self._work, job)
        try:
            return await reply
        except asyncio.CancelledError:
            if begun.cancel():  # it had not: its place and its tensors are free at once
                self._pending -= 1
                job.request = None
            raise

    def _work(self, job: _Job) -> None:
        result: InferResponse | BaseException
        request = job.request
        if request is None or job.reply.done() or job.deadline.expired:
            result = TimedOut()
        else:
            request.timing.queue_ns += time.perf_counter_ns() - job.queued_ns
            try:
                result = self._run(request)
            except BaseException as error:  # crosses to the caller, whatever it is
                result = error
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
        self._executor.shutdown(wait=True, cancel_futures=True)
