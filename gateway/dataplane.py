"""The way of a request past the wire: acquire a handle, validate, infer, count, release."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

import structlog

from gateway.classification import classify
from gateway.errors import Code, Internal, ModelportError, TimedOut, Unavailable
from gateway.lifecycle import Lifecycle
from gateway.model import ServedVersion
from gateway.types import Deadline, InferRequest, InferResponse, Tensor

log = structlog.get_logger("modelport.dataplane")

T = TypeVar("T")


class DataPlane:
    """``infer`` is the one ``Infer`` that every protocol calls."""

    def __init__(
        self, lifecycle: Lifecycle, verbose: bool = False, max_seconds: float | None = None
    ) -> None:
        self._lifecycle = lifecycle
        #: No request takes longer, whatever its own deadline.
        self._max_seconds = max_seconds
        self._verbose = verbose

    async def infer(
        self, request: InferRequest, deadline: Deadline, step: bool = False
    ) -> InferResponse:
        """Answer ``request``. A ``step`` of a request that is already in is never refused.

        Raises:
            ModelportError: with a public message; anything else that goes wrong is logged and
                becomes ``Internal``.
        """
        started = time.perf_counter_ns()
        if not step and self._lifecycle.closing.is_set():
            raise Unavailable("the server is shutting down")
        version = self._lifecycle.acquire(request.model_name, request.model_version)
        statistics = version.statistics
        statistics.pending += 1
        try:
            return await self._run(version, request, deadline, started)
        except ModelportError as error:
            statistics.failed(error.code, time.perf_counter_ns() - started)
            if self._verbose or error.code is Code.INTERNAL:
                log.error(
                    "infer failed", model=version.name, version=version.number,
                    request_id=_request_id(request), error=str(error),
                )  # fmt: skip
            raise
        except asyncio.CancelledError:
            statistics.failed(Code.CANCELLED, time.perf_counter_ns() - started)
            raise
        except Exception as error:
            statistics.failed(Code.INTERNAL, time.perf_counter_ns() - started)
            log.exception("infer failed", model=version.name, request_id=_request_id(request))
            raise Internal("inference failed; the server's log has the reason") from error
        finally:
            statistics.pending -= 1
            version.release()

    def infer_step(self, request: InferRequest, deadline: Deadline) -> Awaitable[InferResponse]:
        """As ``infer``, for the steps of an ensemble: those of a request in flight are finished."""
        return self.infer(request, deadline, step=True)

    async def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        """The responses to ``request`` as they are made: of a decoupled model any number, else one.

        The next one is made when it is asked for. Closing the stream, or cancelling whoever waits
        for the next, stops the work.

        Raises:
            ModelportError: as ``infer``, before any response or after some.
        """
        if not self._lifecycle.get(request.model_name, request.model_version).decoupled:
            yield await self.infer(request, deadline)
            return
        started = time.perf_counter_ns()
        if self._lifecycle.closing.is_set():
            raise Unavailable("the server is shutting down")
        version = self._lifecycle.acquire(request.model_name, request.model_version)
        statistics = version.statistics
        statistics.pending += 1
        try:
            async with aclosing(self._responses(version, request, deadline, started)) as responses:
                async for response in responses:
                    yield response
        except ModelportError as error:
            statistics.failed(error.code, time.perf_counter_ns() - started)
            if self._verbose or error.code is Code.INTERNAL:
                log.error(
                    "stream failed", model=version.name, version=version.number,
                    request_id=_request_id(request), error=str(error),
                )  # fmt: skip
            raise
        except (asyncio.CancelledError, GeneratorExit):
            statistics.failed(Code.CANCELLED, time.perf_counter_ns() - started)
            raise
        except Exception as error:
            statistics.failed(Code.INTERNAL, time.perf_counter_ns() - started)
            log.exception("stream failed", model=version.name, request_id=_request_id(request))
            raise Internal("inference failed; the server's log has the reason") from error
        finally:
            statistics.pending -= 1
            version.release()

    async def _responses(
        self, version: ServedVersion, request: InferRequest, deadline: Deadline, started: int
    ) -> AsyncGenerator[InferResponse, None]:
        deadline = deadline.earliest(self._max_seconds)
        batch = version.validator.check(request)
        statistics, timing, index = version.statistics, request.timing, 0
        asked = time.perf_counter_ns()
        timing.compute_input_ns = asked - started
        if deadline.expired:
            raise TimedOut
        async with aclosing(version.stream(request, deadline)) as responses:
            while True:
                try:
                    response = await within(anext(responses, None), deadline)
                except BaseException as error:
                    statistics.not_responded(index, time.perf_counter_ns() - asked, error)
                    raise
                answered = time.perf_counter_ns()
                timing.compute_infer_ns += answered - asked
                if response is None:
                    statistics.not_responded(index, answered - asked)
                    break
                version.validator.restore(response)
                if request.classification:
                    response.outputs = _classified(version, request, response)
                response.id = request.id
                done = time.perf_counter_ns()
                timing.compute_output_ns += done - answered
                statistics.responded(index, done - started, answered - asked, done - answered)
                yield response
                index += 1
                asked = time.perf_counter_ns()
        statistics.succeeded(batch, time.perf_counter_ns() - started, timing, streamed=True)

    async def _run(
        self, version: ServedVersion, request: InferRequest, deadline: Deadline, started: int
    ) -> InferResponse:
        deadline = deadline.earliest(self._max_seconds)
        batch = version.validator.check(request)
        timing = request.timing
        timing.compute_input_ns += time.perf_counter_ns() - started
        if deadline.expired:
            raise TimedOut
        response = await within(version.infer(request, deadline), deadline)
        answered = time.perf_counter_ns()
        version.validator.restore(response)
        if request.classification:
            response.outputs = _classified(version, request, response)
        response.id = request.id
        done = time.perf_counter_ns()
        timing.compute_output_ns += done - answered
        version.statistics.succeeded(batch, done - started, timing)
        if self._verbose:
            log.debug(
                "infer", model=version.name, version=version.number, batch_size=batch,
                request_id=_request_id(request), milliseconds=(done - started) / 1e6,
            )  # fmt: skip
        return response


async def within(answer: Awaitable[T], deadline: Deadline) -> T:
    """``answer``, or ``TimedOut`` when the deadline comes first; the backend is then cancelled."""
    remaining = deadline.remaining()
    if remaining is None:
        return await answer
    timeout = asyncio.timeout(remaining)  # it makes no task, as ``wait_for`` does
    try:
        async with timeout:
            return await answer
    except TimeoutError:
        if not timeout.expired():
            raise  # the backend's own, whatever it means
        raise TimedOut from None


def _classified(
    version: ServedVersion, request: InferRequest, response: InferResponse
) -> list[Tensor]:
    wanted, batched = request.classification, version.signature.max_batch_size > 0
    return [
        classify(tensor, wanted[tensor.name], version.labels.get(tensor.name, ()), batched)
        if tensor.name in wanted
        else tensor
        for tensor in response.outputs
    ]


def _request_id(request: InferRequest) -> str:
    return request.id or request.trace or uuid.uuid4().hex
