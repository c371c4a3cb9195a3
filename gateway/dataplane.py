"""The way of a request past the wire: acquire a handle, validate, infer, count, release."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable

import structlog

from gateway.classification import classify
from gateway.errors import Code, Internal, ModelportError, TimedOut, Unavailable
from gateway.lifecycle import Lifecycle
from gateway.model import ServedVersion
from gateway.types import Deadline, InferRequest, InferResponse

log = structlog.get_logger("modelport.dataplane")


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

    async def _run(
        self, version: ServedVersion, request: InferRequest, deadline: Deadline, started: int
    ) -> InferResponse:
        deadline = deadline.earliest(self._max_seconds)
        batch = version.validator.check(request)
        timing = request.timing
        timing.compute_input_ns = time.perf_counter_ns() - started
        if deadline.expired:
            raise TimedOut
        response = await within(version.infer(request, deadline), deadline)
        answered = time.perf_counter_ns()
        version.validator.restore(response)
        if request.classification:
            response.outputs = [
                classify(
                    tensor,
                    request.classification[tensor.name],
                    version.labels.get(tensor.name, ()),
                    version.signature.max_batch_size > 0,
                )
                if tensor.name in request.classification
                else tensor
                for tensor in response.outputs
            ]
        response.id = request.id
        done = time.perf_counter_ns()
        timing.compute_output_ns = done - answered
        version.statistics.succeeded(batch, done - started, timing)
        if self._verbose:
            log.debug(
                "infer", model=version.name, version=version.number, batch_size=batch,
                request_id=_request_id(request), milliseconds=(done - started) / 1e6,
            )  # fmt: skip
        return response


async def within(answer: Awaitable[InferResponse], deadline: Deadline) -> InferResponse:
    """``answer``, or ``TimedOut`` when the deadline comes first; the backend is then cancelled."""
    remaining = deadline.remaining()
    if remaining is None:
        return await answer
    try:
        return await asyncio.wait_for(answer, remaining)
    except TimeoutError:
        raise TimedOut from None


def _request_id(request: InferRequest) -> str:
    return request.id or request.trace or uuid.uuid4().hex
