"""The inference service: acquire a model version, validate, infer, count, release."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Protocol

import structlog

from modelport.gateway.errors import Code, Internal, ModelportError, TimedOut, Unavailable
from modelport.gateway.inference.classification import LARGE, classify
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.runtime import offload
from modelport.gateway.runtime.timer_wheel import within
from modelport.gateway.telemetry import request_record, spans
from modelport.gateway.telemetry.captured_traffic import CapturedInference, CapturedTraffic
from modelport.gateway.telemetry.logs import LOGS
from modelport.gateway.types import (
    Answer,
    Deadline,
    InferRequest,
    InferResponse,
    Tensor,
    finished,
)
from modelport.gateway.wire import via_header

log = structlog.get_logger("modelport.inference")


class SupportsInference(Protocol):
    """Answers the requests of clients: ``InferenceService``, or a part before it."""

    def infer(self, request: InferRequest, deadline: Deadline) -> Answer: ...

    def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]: ...

    def refuses(self, name: str, number: int) -> bool: ...


class InferenceService:
    """Runs inference requests.

    A ``step`` is one of an ensemble's, whose request is in flight: it is answered even while the
    server shuts down, and no caller's turn refuses it.
    """

    def __init__(self, manager: ModelManager, max_seconds: float | None = None) -> None:
        self._manager = manager
        #: The upper limit of every request's deadline.
        self._max_seconds = max_seconds

    def infer(self, request: InferRequest, deadline: Deadline, step: bool = False) -> Answer:
        """Answer ``request`` by the version that it names.

        Raises:
            ModelportError: with a public message; any other exception is logged and becomes
                ``Internal``.
        """
        if not step and self._manager.closing.is_set():
            raise Unavailable("the server is shutting down")
        return self.run(request, deadline, step)

    def run(self, request: InferRequest, deadline: Deadline, step: bool = False) -> Answer:
        """Answer a request that is in flight already; raise as ``infer``."""
        flight = self._begin(request, step)
        version = flight.version
        try:
            if request.caller and version.statistics.pending > version.turns.free:
                answer: Answer = self._run_in_turn(flight, deadline, step)
            else:
                answer = self._run(flight, deadline)
        except BaseException as error:
            flight.end(error)
            raise
        if isinstance(answer, InferResponse):
            flight.end()
            return answer
        return flight.wait(answer)

    def _begin(self, request: InferRequest, step: bool) -> _RequestInFlight:
        version = self._manager.get(request.model_name, request.model_version)
        request.via = via_header.CURRENT.get()
        record = request_record.CURRENT.get()
        if record is not None and not step:
            call = record.infers(version.name, version.number, request)
            if call is not None and record.captured is not None:
                return _CapturedRequest(version, request, record.captured, call)
        return _RequestInFlight(version, request)

    def acquire(self, name: str, number: int) -> ServedVersion:
        """Acquire a version for work that is no request of a client; the caller releases it.

        Raises:
            ModelportError: it is not served.
        """
        return self._manager.acquire(name, number)

    def pending(self, name: str, number: int) -> int:
        """The number of requests in progress at a version."""
        version = self._manager.find(name, number)
        return 0 if version is None else version.statistics.pending

    def overloaded(self, name: str, number: int) -> bool:
        """Whether a version, or a step of an ensemble, has more requests than it can compute."""
        version = self._manager.find(name, number)
        if version is None:
            return False
        steps = version.config.ensemble_scheduling.step
        return version.overloaded() or any(
            self.overloaded(each.model_name, max(each.model_version, 0)) for each in steps
        )

    def limited(self, deadline: Deadline) -> Deadline:
        """The deadline within the limit that every request has."""
        return deadline.earliest(self._max_seconds)

    @property
    def closing(self) -> bool:
        """Whether the process ends."""
        return self._manager.closing.is_set()

    def refuses(self, name: str, number: int) -> bool:
        """Whether an overload refuses the next request for this model or version.

        If so, the request need not be read; ``infer`` reports anything else that is wrong with it.
        """
        version = self._manager.find(name, number)
        if version is None or not version.refuses():
            return False
        version.statistics.failed(Code.UNAVAILABLE, 0)
        return True

    async def stream(
        self, request: InferRequest, deadline: Deadline, step: bool = False
    ) -> AsyncGenerator[InferResponse, None]:
        """Yield the responses to ``request``: any number from a decoupled model, else one.

        Each response is computed when it is requested. Closing the generator, or cancelling the
        task that awaits it, stops the work.

        Raises:
            ModelportError: as ``infer``, before any response or after some.
        """
        if not self.is_decoupled(request):
            yield replace(await finished(self.infer(request, deadline, step)), final=True)
            return
        if not step and self._manager.closing.is_set():
            raise Unavailable("the server is shutting down")
        flight = self._begin(request, step)
        version, started = flight.version, flight.started
        with flight:
            deadline = self.limited(deadline)
            batch = request.timing.batch_size = version.validator.check(request)
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
                    flight.restore(response)
                    if request.classification:
                        response.outputs = await _classified(version, request, response, deadline)
                    response.id = request.id
                    done = time.perf_counter_ns()
                    timing.compute_output_ns += done - answered
                    statistics.responded(index, done - started, answered - asked, done - answered)
                    yield response
                    index += 1
                    asked = time.perf_counter_ns()
            ended = time.perf_counter_ns()
            statistics.succeeded(batch, ended - started, timing, streamed=True)
            if request.span is not None:
                begun = started + timing.compute_input_ns
                request.span.child("compute", begun, ended, responses=index)
                statistics.traced(ended - started, timing, request.span)

    def is_decoupled(self, request: InferRequest) -> bool:
        """Whether the model gives any number of responses.

        Raises:
            ModelportError: it is not served.
        """
        return self._manager.get(request.model_name, request.model_version).decoupled

    async def _run_in_turn(
        self, flight: _RequestInFlight, deadline: Deadline, step: bool
    ) -> InferResponse:
        """Run the version when it is the turn of the request's caller."""
        request, turns = flight.request, flight.version.turns
        await turns.enter(request.caller, self.limited(deadline), refuses=not step)
        try:
            waited = time.perf_counter_ns() - flight.started
            if request.span is not None:
                request.span.child("queue", flight.started, flight.started + waited)
            request.timing.queue_ns += waited
            request.timing.compute_input_ns -= waited  # ``_run`` counts all time until now
            return await finished(self._run(flight, deadline))
        finally:
            turns.leave(request.caller)

    def _run(self, flight: _RequestInFlight, deadline: Deadline) -> Answer:
        if self._max_seconds is not None:
            deadline = deadline.earliest(self._max_seconds)
        request = flight.request
        flight.validator = flight.version.validator_of(request)
        flight.batch = request.timing.batch_size = flight.validator.check(request)
        request.timing.compute_input_ns += time.perf_counter_ns() - flight.started
        if deadline.expired:
            raise TimedOut
        answer = flight.version.infer(request, deadline)
        if isinstance(answer, InferResponse) and not request.classification:
            flight.restore(answer)
            return flight.complete(answer)
        return self._complete(flight, deadline, answer)

    async def _complete(
        self, flight: _RequestInFlight, deadline: Deadline, answer: Answer
    ) -> InferResponse:
        """Wait for the response, and complete it; its classes may be sorted in a thread."""
        version, request = flight.version, flight.request
        if not isinstance(answer, InferResponse):
            answer = await (answer if deadline.at is None else within(answer, deadline))
        flight.restore(answer)
        if request.classification:
            request.unclassified = answer.outputs
            answer.outputs = await _classified(version, request, answer, deadline)
        return flight.complete(answer)


class _RequestInFlight:
    """A request at a version: counts it as pending until its end, and counts and logs its failure.

    ``started`` and other times are those of ``time.perf_counter_ns``.
    """

    __slots__ = ("_answered", "batch", "request", "started", "validator", "version")

    def __init__(self, version: ServedVersion, request: InferRequest) -> None:
        self.version, self.request, self.started = version, request, time.perf_counter_ns()
        self.validator = version.validator
        self.batch = self._answered = 0
        version.in_flight += 1
        version.statistics.pending += 1

    def restore(self, response: InferResponse) -> None:
        """Give the outputs of a response the shapes of the wire."""
        self._answered = time.perf_counter_ns()
        self.validator.restore(response)

    def complete(self, response: InferResponse) -> InferResponse:
        """Count a response that has been restored; return it with the request's id."""
        request, version = self.request, self.version
        response.id = request.id
        done = time.perf_counter_ns()
        request.timing.compute_output_ns += done - self._answered
        version.statistics.succeeded(self.batch, done - self.started, request.timing)
        if request.span is not None:
            spans.answered(request, response, self._answered)
            version.statistics.traced(done - self.started, request.timing, request.span)
        if LOGS.verbose_level:
            log.debug(
                "infer", model=version.name, version=version.number, batch_size=self.batch,
                request_id=_request_id(request), milliseconds=(done - self.started) / 1e6,
            )  # fmt: skip
        return response

    async def wait(self, answer: Awaitable[InferResponse]) -> InferResponse:
        """Wait for the response, and end."""
        with self:
            return await answer

    def __enter__(self) -> None:
        """End with the block; the request waits for an instance until it has begun."""
        timing = self.request.timing
        self.version.statistics.waiting[id(timing)] = timing

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        del self.version.statistics.waiting[id(self.request.timing)]
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """End the request, by ``error`` if it has failed.

        Raises:
            Internal: in place of an error without a public message, which is logged.
        """
        version = self.version
        version.statistics.pending -= 1
        version.release()
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        version, code = self.version, Code.INTERNAL
        if isinstance(error, ModelportError):
            code = error.code
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            code = Code.CANCELLED
        elif not isinstance(error, Exception):
            return  # the process ends
        version.statistics.failed(code, time.perf_counter_ns() - self.started)
        if isinstance(error, ModelportError):
            if LOGS.verbose_level or code is Code.INTERNAL:
                log.error(
                    "infer failed", model=version.name, version=version.number,
                    request_id=_request_id(self.request), error=str(error),
                )  # fmt: skip
        elif code is Code.INTERNAL:
            log.exception("infer failed", model=version.name, request_id=_request_id(self.request))
            raise Internal("inference failed; the server's log has the reason") from error


class _CapturedRequest(_RequestInFlight):
    """A request that is recorded."""

    __slots__ = ("_call", "_captured")

    def __init__(
        self,
        version: ServedVersion,
        request: InferRequest,
        captured: CapturedTraffic,
        call: CapturedInference,
    ) -> None:
        super().__init__(version, request)
        self._captured, self._call = captured, call

    def restore(self, response: InferResponse) -> None:
        super().restore(response)
        self._captured.inferred(self._call, response)


async def _classified(
    version: ServedVersion, request: InferRequest, response: InferResponse, deadline: Deadline
) -> list[Tensor]:
    wanted, batched = request.classification, version.signature.max_batch_size > 0
    outputs = []
    for tensor in response.outputs:
        if tensor.name in wanted:
            labels = version.labels_of(tensor.name)
            work = partial(classify, tensor, wanted[tensor.name], labels, batched)
            large = tensor.data.size > LARGE
            tensor = await offload.run(work, deadline) if large else work()
        outputs.append(tensor)
    return outputs


def _request_id(request: InferRequest) -> str:
    return request.id or request.trace or uuid.uuid4().hex
