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

from gateway.errors import TimedOut, Unavailable
from gateway.types import Deadline, InferRequest, InferResponse

Run = Callable[[InferRequest], InferResponse]

#: Requests waiting per model version when ``max_queue_size`` does not say.
DEFAULT_MAX_QUEUE_SIZE = 4096
#: A run below this is made on the event loop itself. Handing it to a thread and waking the loop
#: again costs about as much, for the request and for the loop (`make bench` measures it).
INLINE_SECONDS = 100e-6
#: After one run on the event loop that took longer than this, every further one goes to a thread.
SLOW_INLINE_NS = 5_000_000
NEVER = -1


class Instances:
    """``count`` threads over ``run``; at most ``max_queue_size`` requests wait."""

    def __init__(self, run: Run, name: str, count: int, max_queue_size: int = 0) -> None:
        self._run = run
        self._limit = count + (max_queue_size or DEFAULT_MAX_QUEUE_SIZE)
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=name)
        # Requests handed to the threads and not yet finished; the event loop alone changes it.
        self._pending = 0
        self._inline_elements = NEVER

    def allow_inline(self, elements: int) -> None:
        """Run requests of at most ``elements`` input elements on the event loop."""
        self._inline_elements = elements

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        if deadline.expired:
            raise TimedOut
        if not self._pending and sum(t.data.size for t in request.inputs) <= self._inline_elements:
            response = self._run(request)
            if request.timing.compute_infer_ns > SLOW_INLINE_NS:
                self._inline_elements = NEVER  # its time depends on more than its size
            return response
        if self._pending >= self._limit:
            raise Unavailable("Exceeds maximum queue size")
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[InferResponse] = loop.create_future()
        self._pending += 1
        job = self._executor.submit(
            self._work, loop, reply, request, deadline, time.perf_counter_ns()
        )
        try:
            return await reply
        except asyncio.CancelledError:
            if job.cancel():  # it had not begun: its place in the queue is free at once
                self._pending -= 1
            raise

    def _work(
        self,
        loop: asyncio.AbstractEventLoop,
        reply: asyncio.Future[InferResponse],
        request: InferRequest,
        deadline: Deadline,
        queued_ns: int,
    ) -> None:
        result: InferResponse | BaseException
        if reply.done() or deadline.expired:
            result = TimedOut()
        else:
            request.timing.queue_ns = time.perf_counter_ns() - queued_ns
            try:
                result = self._run(request)
            except BaseException as error:  # crosses to the caller, whatever it is
                result = error
        loop.call_soon_threadsafe(self._finish, reply, result)

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
