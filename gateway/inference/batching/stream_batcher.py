"""Batches of requests to decoupled models: executed together, answered by a stream each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from modelport.gateway.backends.base import Execution
from modelport.gateway.backends.capabilities import OpenedStream, StreamsTogetherBackend, Together
from modelport.gateway.errors import ModelportError, Unavailable
from modelport.gateway.inference.batching.batcher import Batcher
from modelport.gateway.inference.batching.dynamic_batching import BatchingSettings
from modelport.gateway.inference.batching.joining import Joiner
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import Deadline, Infer, InferRequest, InferResponse, finished


class StreamBatcher:
    """The streams of a backend, whose requests wait for their turn in a ``Batcher``.

    As in Triton, the turn of a batch ends when its execution returns, not with its responses.
    """

    def __init__(
        self,
        backend: StreamsTogetherBackend,
        execution: Execution,
        settings: BatchingSettings,
        joiner: Joiner,
        statistics: Statistics,
        limited: Callable[[Infer, Together, Execution], tuple[Infer, Together | None, Execution]],
    ) -> None:
        self._backend = backend
        infer, together, waits = limited(self._execute, self._execute_together, execution)
        self._batcher = Batcher(infer, waits, settings, joiner, statistics, together)
        #: By the identity of their requests, which wait or are executed.
        self._opened: dict[int, OpenedStream] = {}

    async def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        """Yield the responses to ``request``, as ``StreamingBackend.stream``."""
        opened = self._opened[id(request)] = self._backend.open(request, deadline)
        request.timing.counted = True  # the batcher does, perhaps after the last response
        turn = asyncio.create_task(self._turn(request, deadline))
        turn.add_done_callback(partial(_end, opened))
        try:
            async with aclosing(self._backend.responses(opened)) as responses:
                async for response in responses:
                    yield response
        except BaseException:
            turn.cancel()  # else it ends, and is counted, with its execution
            raise
        finally:
            del self._opened[id(request)]

    async def _turn(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        return await finished(self._batcher(request, deadline))

    async def _execute(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        (response,) = await self._execute_together([request], [deadline], [])
        return response

    async def _execute_together(
        self, requests: Sequence[InferRequest], deadlines: Any, replies: Any
    ) -> list[InferResponse]:
        found = (self._opened.get(id(request)) for request in requests)
        await self._backend.execute_together([each for each in found if each is not None])
        return [InferResponse(each.model_name, each.model_version, []) for each in requests]


def _end(opened: OpenedStream, turn: asyncio.Future[InferResponse]) -> None:
    """End a stream whose request was refused, or could not be executed."""
    if turn.cancelled():
        return
    error = turn.exception()
    if isinstance(error, ModelportError):
        opened.settle(error, True)
    elif error is not None:
        opened.settle(Unavailable("the execution has failed"), True)
