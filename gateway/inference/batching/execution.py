"""The execution of a batch that has been formed."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence

from modelport.gateway.backends.capabilities import Outcome, Together
from modelport.gateway.errors import TimedOut, Unavailable
from modelport.gateway.inference.batching.joining import Joiner
from modelport.gateway.inference.batching.queue import QueuedRequest
from modelport.gateway.telemetry import Statistics, spans
from modelport.gateway.types import Deadline, Infer, InferRequest, InferResponse, finished


class BatchRunner:
    """Runs batches by ``infer``.

    Args:
        together: runs a batch without joining its requests, in place of ``joiner``.
    """

    def __init__(
        self,
        infer: Infer,
        joiner: Joiner,
        statistics: Statistics,
        together: Together | None = None,
    ) -> None:
        self._infer, self._joiner = infer, joiner
        self._statistics, self._together = statistics, together

    async def run(self, members: Sequence[QueuedRequest]) -> Sequence[Outcome]:
        """The outcome of each of ``members``, which can be joined."""
        started = time.monotonic_ns()
        for waiting in members:
            request = waiting.request
            request.timing.queue_ns += started - waiting.queued_ns
            if request.span is not None:
                request.span.child("queue", waiting.queued_ns, started)
        if len(members) == 1:
            return [await self._run_alone(members[0])]
        requests = [waiting.request for waiting in members]
        if self._together is not None:
            return await self._run_beside(requests, members)
        try:
            return await self._run_joined(requests, _latest(members))
        except Unavailable as error:  # not caused by a single request
            return [copy.copy(error) for _ in members]
        except Exception:
            # One request may cause the error, so run each on its own.
            return [await self._run_alone(waiting) for waiting in members]

    async def _run_alone(self, waiting: QueuedRequest) -> Outcome:
        request = waiting.request
        if waiting.reply.done() or waiting.deadline.expired:
            return TimedOut()
        try:
            response = await finished(self._infer(request, waiting.deadline))
        except Exception as error:
            return error
        self._statistics.executed(waiting.size, request.timing)
        request.timing.counted = True
        return response

    async def _run_beside(
        self, requests: Sequence[InferRequest], members: Sequence[QueuedRequest]
    ) -> Sequence[Outcome]:
        """Run a batch of a backend that takes its requests side by side."""
        assert self._together is not None
        size = sum(waiting.size for waiting in members)
        batch = spans.of_batch(requests, size)
        try:
            outcomes = await self._together(
                requests,
                [waiting.deadline for waiting in members],
                [waiting.reply for waiting in members],
            )
        except Exception as error:
            return [copy.copy(error) for _ in members]
        finally:
            if batch is not None:
                spans.end_batch(batch)
        self._statistics.executed(size, requests[0].timing)
        for request in requests:
            request.timing.counted, request.timing.batch_size = True, size
        return outcomes

    async def _run_joined(
        self, requests: Sequence[InferRequest], deadline: Deadline
    ) -> Sequence[InferResponse]:
        started = time.perf_counter_ns()
        joined = self._joiner.join(requests)
        size, timing = self._joiner.size(joined), joined.timing
        for request in requests:
            request.timing.joined = timing
        timing.compute_input_ns = time.perf_counter_ns() - started
        joined.span = spans.of_batch(requests, size)
        try:
            response = await finished(self._infer(joined, deadline))
        finally:
            if joined.span is not None:
                spans.end_batch(joined.span)
        answered = time.perf_counter_ns()
        answers = self._joiner.split(response, joined, requests)
        timing.compute_output_ns = time.perf_counter_ns() - answered
        self._statistics.executed(size, timing)
        for request in requests:
            each = request.timing
            each.queue_ns += timing.queue_ns
            each.compute_input_ns += timing.compute_input_ns
            each.compute_infer_ns += timing.compute_infer_ns
            each.compute_output_ns += timing.compute_output_ns
            each.counted, each.batch_size = True, size
        return answers


def _latest(members: Sequence[QueuedRequest]) -> Deadline:
    """The latest deadline of ``members``; each request also enforces its own."""
    return max(
        (each.deadline for each in members), key=lambda d: math.inf if d.at is None else d.at
    )
