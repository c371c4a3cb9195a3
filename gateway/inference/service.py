"""The inference service: acquire a model version, validate, infer, count, release."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog

from modelport.gateway.backends.capabilities import BackgroundWork, BlockingInfer
from modelport.gateway.errors import Code, Internal, ModelportError, TimedOut, Unavailable
from modelport.gateway.inference.classification import LARGE, classify
from modelport.gateway.inference.validation import Validator
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.rollout.traffic import request_routing
from modelport.gateway.runtime import offload, thread_reply
from modelport.gateway.runtime.timer_wheel import within
from modelport.gateway.types import Deadline, InferRequest, InferResponse, Tensor
from modelport.gateway.wire import via_header

if TYPE_CHECKING:
    from modelport.gateway.rollout.traffic.traffic_split import TrafficSplit

log = structlog.get_logger("modelport.inference")


class SupportsInference(Protocol):
    """The methods of ``InferenceService`` for requests of clients."""

    splits: dict[str, TrafficSplit]

    def infer(self, request: InferRequest, deadline: Deadline) -> Awaitable[InferResponse]: ...

    def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]: ...

    def refuses(self, name: str, number: int) -> bool: ...


class InferenceService:
    """Runs inference requests; every protocol calls its one ``infer``."""

    def __init__(
        self, manager: ModelManager, verbose: bool = False, max_seconds: float | None = None
    ) -> None:
        self._manager = manager
        #: The upper limit of every request's deadline.
        self._max_seconds = max_seconds
        self._verbose = verbose
        #: Traffic splits by model; empty while no rollout runs. Only ``Rollouts`` changes it.
        self.splits: dict[str, TrafficSplit] = {}

    def infer(
        self, request: InferRequest, deadline: Deadline, step: bool = False
    ) -> Awaitable[InferResponse]:
        """Answer ``request``. A ``step`` of an ensemble request in flight always finishes.

        Raises:
            ModelportError: with a public message; any other exception is logged and becomes
                ``Internal``.
        """
        if step:
            routing = request_routing.CURRENT.get()
            if routing is not None and routing.is_copy:
                return self.infer_copy(request, deadline)
        elif self._manager.closing.is_set():
            raise Unavailable("the server is shutting down")
        if self.splits:
            split = self.splits.get(request.model_name)
            if split is not None and split.diverts(request):
                return split.infer(request, deadline.earliest(self._max_seconds), step)
        return self.infer_version(request, deadline, step)

    async def infer_version(
        self, request: InferRequest, deadline: Deadline, step: bool = False
    ) -> InferResponse:
        """Run the version that ``request`` names, without a traffic split; raises as ``infer``."""
        started = time.perf_counter_ns()
        version = self._manager.acquire(request.model_name, request.model_version)
        request.via = via_header.CURRENT.get()
        with _Counted(version, request, started, self._verbose):
            if request.caller and version.statistics.pending > version.turns.free:
                return await self._run_in_turn(version, request, deadline, started, step)
            return await self._run(version, request, deadline, started)

    async def infer_copy(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        """Answer a copy of a request, which is in no batch, cache, queue or statistics.

        Raises:
            ModelportError: as ``infer``.
        """
        version = self._manager.acquire(request.model_name, request.model_version)
        try:
            validator = _checked(version, request)
            if version.in_background is None:
                answer = version.backend(request, deadline)
            else:
                answer = _in_background(version.in_background, request)
            response = await within(answer, deadline)
            validator.restore(response)
            return response
        finally:
            version.release()

    def acquire_in_background(self, name: str, number: int) -> ServedVersion | None:
        """Acquire a version for ``answer_copy``; None if its backend has no background thread.

        Raises:
            ModelportError: the version is not served.
        """
        version = self._manager.acquire(name, number)
        if version.in_background is None:
            version.release()
            return None
        return version

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
        if not self._manager.get(request.model_name, request.model_version).decoupled:
            yield await self.infer(request, deadline, step)
            return
        started = time.perf_counter_ns()
        if not step and self._manager.closing.is_set():
            raise Unavailable("the server is shutting down")
        version = self._manager.acquire(request.model_name, request.model_version)
        request.via = via_header.CURRENT.get()
        with _Counted(version, request, started, self._verbose):
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
                        response.outputs = await _classified(version, request, response, deadline)
                    response.id = request.id
                    done = time.perf_counter_ns()
                    timing.compute_output_ns += done - answered
                    statistics.responded(index, done - started, answered - asked, done - answered)
                    yield response
                    index += 1
                    asked = time.perf_counter_ns()
            statistics.succeeded(batch, time.perf_counter_ns() - started, timing, streamed=True)

    async def _run_in_turn(
        self,
        version: ServedVersion,
        request: InferRequest,
        deadline: Deadline,
        started: int,
        step: bool,
    ) -> InferResponse:
        """Run the version when it is the turn of the request's caller."""
        turns, caller = version.turns, request.caller
        await turns.enter(caller, deadline.earliest(self._max_seconds), refuses=not step)
        try:
            waited = time.perf_counter_ns() - started
            request.timing.queue_ns += waited
            request.timing.compute_input_ns -= waited  # ``_run`` counts all time until now
            return await self._run(version, request, deadline, started)
        finally:
            turns.leave(caller)

    async def _run(
        self, version: ServedVersion, request: InferRequest, deadline: Deadline, started: int
    ) -> InferResponse:
        if self._max_seconds is not None:
            deadline = deadline.earliest(self._max_seconds)
        validator = version.validator
        if request.signature:
            validator = version.signatures.validator(request.signature)
        batch = validator.check(request)
        timing = request.timing
        timing.compute_input_ns += time.perf_counter_ns() - started
        if deadline.at is None:
            response = await version.infer(request, deadline)
        elif deadline.expired:
            raise TimedOut
        else:
            response = await within(version.infer(request, deadline), deadline)
        answered = time.perf_counter_ns()
        validator.restore(response)
        if request.classification:
            request.unclassified = response.outputs
            response.outputs = await _classified(version, request, response, deadline)
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


class _Counted:
    """A request in flight: counts it as pending, and counts and logs its failure.

    A class, because a generator-based context manager costs every request three times as much.
    """

    __slots__ = ("_request", "_started", "_verbose", "_version")

    def __init__(
        self, version: ServedVersion, request: InferRequest, started: int, verbose: bool
    ) -> None:
        self._version = version
        self._request = request
        self._started = started
        self._verbose = verbose

    def __enter__(self) -> None:
        self._version.statistics.pending += 1

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        version = self._version
        version.statistics.pending -= 1
        version.release()
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        version, code = self._version, Code.INTERNAL
        if isinstance(error, ModelportError):
            code = error.code
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            code = Code.CANCELLED
        elif not isinstance(error, Exception):
            return  # the process ends
        version.statistics.failed(code, time.perf_counter_ns() - self._started)
        if isinstance(error, ModelportError):
            if self._verbose or code is Code.INTERNAL:
                log.error(
                    "infer failed", model=version.name, version=version.number,
                    request_id=_request_id(self._request), error=str(error),
                )  # fmt: skip
        elif code is Code.INTERNAL:
            log.exception("infer failed", model=version.name, request_id=_request_id(self._request))
            raise Internal("inference failed; the server's log has the reason") from error


def answer_copy(
    version: ServedVersion, request: InferRequest, infer: BlockingInfer
) -> InferResponse:
    """Answer as ``InferenceService.infer_copy``, in a thread, by ``infer`` of ``in_background``."""
    validator = _checked(version, request)
    response = infer(request)
    validator.restore(response)
    return response


def _checked(version: ServedVersion, request: InferRequest) -> Validator:
    """Check the request for the version; return the validator of its signature."""
    validator = version.validator
    if request.signature:
        validator = version.signatures.validator(request.signature)
    validator.check(request)
    return validator


async def _in_background(
    begin: Callable[[BackgroundWork], None], request: InferRequest
) -> InferResponse:
    loop = asyncio.get_running_loop()
    reply: asyncio.Future[InferResponse] = loop.create_future()

    def work(infer: BlockingInfer) -> None:
        if reply.done():  # nobody waits any more
            return
        result: InferResponse | BaseException
        try:
            result = infer(request)
        except BaseException as error:  # re-raised in the caller
            result = error
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(thread_reply.settle, reply, result)

    begin(work)
    return await reply


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
