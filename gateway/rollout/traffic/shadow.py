"""Copies of requests for the other side of a rollout, whose answers are compared and thrown away.

A copy never harms the requests of clients. It waits for a moment in which none is in progress, one
copy runs at a time, and it has its own deadline. It takes no part in batching, caching, admission
and statistics. A copy that finds no place or no moment is dropped and counted.

If the other side computes on this machine, everything but the choice of the moment happens in its
background thread, which does not wake the event loop unless more copies wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import structlog

from modelport.gateway.backends.capabilities import BackgroundWork, BlockingInfer
from modelport.gateway.errors import MemoryExhausted, ModelportError, QueueFull
from modelport.gateway.inference.text.text_infer import TEXT_SIGNATURE
from modelport.gateway.inference.validation import Validator
from modelport.gateway.models.inference_service import InferenceService
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.rollout.plan import RolloutSide
from modelport.gateway.rollout.traffic import request_routing
from modelport.gateway.rollout.traffic.sides import StageTraffic, addressed
from modelport.gateway.runtime import thread_reply
from modelport.gateway.runtime.timer_wheel import within
from modelport.gateway.types import Deadline, InferRequest, InferResponse, Tensor, finished

log = structlog.get_logger("modelport.rollout")

T = TypeVar("T")

#: Most copies that wait, and their tensors.
MAX_COPIES = 16
MAX_BYTES = 64 * 1024 * 1024
#: Longest wait of a copy, and longest wait for a moment without requests of clients.
MAX_WAIT_SECONDS = 5.0
PATIENCE_SECONDS = 1.0
#: A copy's deadline: some time, and a multiple of the time that the client's answer took.
DEADLINE_SECONDS, DEADLINE_FACTOR = 10.0, 5.0
#: More copies dropped in a row are a problem of the stage.
MANY_DROPPED = 50
#: Outputs with more elements are not compared on the event loop.
INLINE_ELEMENTS = 65_536


@dataclass(slots=True)
class ShadowCopy:
    """A request of a client, and the outputs that the client got after ``seconds``.

    ``side`` answers the copy: the candidate, or the baseline in place of a candidate's answer.
    """

    request: InferRequest
    answer: Sequence[Tensor]
    seconds: float
    side: RolloutSide
    stage: StageTraffic
    queued_at: float = 0.0
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.size_bytes = sum(each.size_bytes for each in (*self.request.inputs, *self.answer))


@dataclass(frozen=True, slots=True)
class UncomparedCopy:
    """The end of a copy without a comparison.

    ``dropped`` is the reason why it got no answer; empty: the side failed.
    """

    dropped: str = ""


#: The side failed, or did not answer in time.
FAILED = UncomparedCopy()
_STOPPED = UncomparedCopy("the stage has ended")


class ShadowListener(Protocol[T]):
    """Compares answers, and gets the outcome of every copy."""

    def compare(self, copy: ShadowCopy, response: InferResponse) -> T:
        """Compare the answer to a copy with the one that the client got, in any thread."""

    def compared(self, copy: ShadowCopy, comparison: T) -> None: ...

    def ended(self, copy: ShadowCopy, outcome: UncomparedCopy) -> None: ...


@dataclass(slots=True, eq=False)
class _RunningCopy:
    """A copy in progress: in the background thread of ``version``, or in ``task``."""

    copy: ShadowCopy
    #: The end of its deadline, by ``time.monotonic``.
    latest: float
    loop: asyncio.AbstractEventLoop
    version: ServedVersion | None = None
    task: asyncio.Task[None] | None = None
    #: Whether it was counted. A thread may still compute.
    ended: bool = False


class ShadowQueue(Generic[T]):
    """The copies of one rollout in this process. Only the event loop calls its public methods.

    Args:
        sides: the baseline and the candidate.
    """

    def __init__(
        self,
        service: InferenceService,
        listener: ShadowListener[T],
        sides: tuple[RolloutSide, RolloutSide],
    ) -> None:
        self._service, self._listener = service, listener
        self._sides = sides
        #: Copies that were dropped since the last one that was answered, and the latest reason.
        self._dropped, self._reason = 0, ""
        self._waiting: deque[ShadowCopy] = deque()
        self._bytes = 0
        self._running: _RunningCopy | None = None
        #: The outcomes of copies in threads, which append to it.
        self._finished: deque[tuple[_RunningCopy, T | UncomparedCopy]] = deque()
        #: Since when the first of the waiting copies waits for its moment.
        self._free_since = 0.0
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def problem(self) -> str:
        """The reason why nothing is compared; empty while copies are answered."""
        if self._dropped < MANY_DROPPED:
            return ""
        return f"the last {self._dropped:,} copies were dropped: {self._reason}"

    def offer(self, copy: ShadowCopy) -> None:
        """Queue ``copy``, or drop it."""
        self.settle()
        size = self._bytes + copy.size_bytes
        if len(self._waiting) >= MAX_COPIES:
            self._drop(copy, f"{MAX_COPIES} others wait for a moment without requests of clients")
            return
        if size > MAX_BYTES:
            self._drop(copy, f"the tensors of those that wait exceed {MAX_BYTES >> 20} MiB")
            return
        if obstacle := self._obstacle():
            self._drop(copy, obstacle)
            return
        copy.queued_at = time.monotonic()
        self._bytes = size
        self._waiting.append(copy)
        self.advance()

    def _obstacle(self) -> str:
        """The reason why no copy may be sent now."""
        if self._service.closing:
            return "the gateway ends"
        for name, side in zip(("baseline", "candidate"), self._sides, strict=True):
            if self._service.overloaded(*side):
                return f"the {name} is overloaded"
        return ""

    def _busy(self) -> bool:
        """Whether requests of clients are in progress."""
        return any(self._service.pending(*side) for side in self._sides)

    def _drop(self, copy: ShadowCopy, reason: str) -> None:
        self._dropped, self._reason = self._dropped + 1, reason
        self._listener.ended(copy, UncomparedCopy(reason))

    def advance(self) -> None:
        """Note that a request of a client has been answered."""
        if self._waiting and not self._scheduled:
            self._scheduled = True
            loop = asyncio.get_running_loop()
            # Requests that have come in the meantime are first: one iteration of the loop reads
            # them, the next one begins them.
            loop.call_soon(loop.call_soon, self._begin)

    def settle(self) -> None:
        """Count the copies that have ended, or exceed their deadline."""
        while self._finished:
            self._end(*self._finished.popleft())
        running = self._running
        if running is not None and time.monotonic() >= running.latest and running.task is None:
            self._end(running, FAILED)

    def stop(self) -> None:
        """Drop all copies, the one in progress too."""
        self.settle()
        running, self._running = self._running, None
        if running is not None and running.task is not None:
            running.task.cancel()  # it ends the copy
        elif running is not None:
            self._end(running, _STOPPED)
        for copy in self._waiting:
            self._listener.ended(copy, _STOPPED)
        self._dropped = 0
        self._waiting.clear()
        self._bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        """Begin the next copy if this is a moment for it."""
        self._scheduled = False
        self.settle()
        while self._waiting and self._running is None:
            copy, now = self._waiting[0], time.monotonic()
            since = max(copy.queued_at, self._free_since)
            if self._busy() and now < since + PATIENCE_SECONDS:
                break
            self._waiting.popleft()
            self._bytes -= copy.size_bytes
            reason = self._obstacle()
            if now - copy.queued_at > MAX_WAIT_SECONDS:
                reason = f"it has waited for more than {MAX_WAIT_SECONDS:g} s"
            if reason:
                self._drop(copy, reason)
            else:
                self._answer(copy, now)
        if self._timer is None and (self._waiting or self._running is not None):
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._look)

    def _look(self) -> None:
        """Look at the copies although no request of a client has been answered."""
        self._timer = None
        self._begin()

    def _answer(self, copy: ShadowCopy, now: float) -> None:
        loop = asyncio.get_running_loop()
        latest = now + DEADLINE_SECONDS + DEADLINE_FACTOR * copy.seconds
        self._running = running = _RunningCopy(copy, latest, loop)
        try:
            version = self._service.acquire(*copy.side)
        except ModelportError as error:
            self._end(running, _outcome_of(copy, error))
            return
        if version.in_background is None or version.takes_texts(copy.request):
            version.release()
            # A context of its own: copies belong to no request.
            context = contextvars.Context()
            running.task = loop.create_task(self._answer_on_loop(running), context=context)
        else:
            running.version = version
            version.in_background(lambda infer: self._answer_in_thread(running, version, infer))

    def _answer_in_thread(
        self, running: _RunningCopy, version: ServedVersion, infer: BlockingInfer
    ) -> None:
        if running.ended:
            return
        outcome: T | UncomparedCopy
        try:
            response = _infer_in_thread(version, _request(running.copy), infer)
        except Exception as error:
            outcome = _outcome_of(running.copy, error)
        else:
            outcome = self._compared(running.copy, response)
        self._finished.append((running, outcome))
        if self._waiting:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                running.loop.call_soon_threadsafe(self.advance)

    async def _answer_on_loop(self, running: _RunningCopy) -> None:
        request_routing.CURRENT.set(request_routing.RequestRouting(is_copy=True))
        copy, deadline = running.copy, Deadline(running.latest)
        outcome: T | UncomparedCopy = _STOPPED
        try:
            response = await infer_copy(self._service, _request(copy), deadline)
        except Exception as error:
            outcome = _outcome_of(copy, error)
        else:
            if sum(each.data.size for each in copy.answer) > INLINE_ELEMENTS:
                outcome = await asyncio.to_thread(self._compared, copy, response)
            else:
                outcome = self._compared(copy, response)
        finally:
            self._end(running, outcome)
        self.advance()

    def _compared(self, copy: ShadowCopy, response: InferResponse) -> T | UncomparedCopy:
        try:
            return self._listener.compare(copy, response)
        except Exception:
            log.exception(
                "the answer to a shadow copy was not compared", model=copy.request.model_name
            )
            return UncomparedCopy("its answer could not be compared; the log has the error")

    def _end(self, running: _RunningCopy, outcome: T | UncomparedCopy) -> None:
        """Count a copy, and let the next one begin."""
        if running.ended:
            return
        running.ended = True
        if running.version is not None:
            running.version.release()
        if running is self._running:
            self._running, self._free_since = None, time.monotonic()
        if not isinstance(outcome, UncomparedCopy):
            self._dropped = 0
            self._listener.compared(running.copy, outcome)
        elif outcome.dropped:
            self._drop(running.copy, outcome.dropped)
        else:
            self._dropped = 0
            self._listener.ended(running.copy, outcome)


async def infer_copy(
    service: InferenceService, request: InferRequest, deadline: Deadline
) -> InferResponse:
    """Answer a copy of a request, which is in no batch, cache, queue or statistics.

    Raises:
        ModelportError: as ``InferenceService.infer``.
    """
    version = service.acquire(request.model_name, request.model_version)
    try:
        validator = _checked(version, request)
        if version.texts is not None and request.signature == TEXT_SIGNATURE:
            answer = finished(version.texts(request, deadline))
        elif version.in_background is None:
            answer = finished(version.backend(request, deadline))
        else:
            answer = _infer_in_background(version.in_background, request)
        response = await within(answer, deadline)
        validator.restore(response)
        return response
    finally:
        version.release()


def _infer_in_thread(
    version: ServedVersion, request: InferRequest, infer: BlockingInfer
) -> InferResponse:
    """Answer as ``infer_copy``, by ``infer`` of a version's ``in_background``."""
    validator = _checked(version, request)
    response = infer(request)
    validator.restore(response)
    return response


def _checked(version: ServedVersion, request: InferRequest) -> Validator:
    """Check the request for the version; return the validator of its signature."""
    validator = version.validator_of(request)
    validator.check(request)
    return validator


async def _infer_in_background(
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
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(thread_reply.settle, reply, result)

    begin(work)
    return await reply


def _request(copy: ShadowCopy) -> InferRequest:
    request = addressed(copy.request, copy.side)
    request.span = None  # the trace of the client's request has ended
    request.classification = {}
    return request


def _outcome_of(copy: ShadowCopy, error: Exception) -> UncomparedCopy:
    if isinstance(error, QueueFull | MemoryExhausted):
        return UncomparedCopy(str(error))
    if not isinstance(error, ModelportError):
        log.error("a shadow copy failed", model=copy.request.model_name, exc_info=error)
    return FAILED
