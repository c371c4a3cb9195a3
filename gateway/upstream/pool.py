"""The endpoint pool of a route: send requests, retry on another endpoint, probe ejected ones.

A request that fails because of its endpoint is retried once on another, within its deadline and the
budget of ``retries``. An endpoint that has requests in flight and does not respond for a while is
probed; if the probe fails too, it is ejected and those requests are sent elsewhere. The policy is
in ``outlier_detection``.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

import structlog

from modelport.gateway.errors import Internal, ModelportError, QueueFull, TimedOut, Unavailable
from modelport.gateway.repository.routes_file import OutlierDetection
from modelport.gateway.runtime.timer_wheel import TimeLimit
from modelport.gateway.types import Deadline
from modelport.gateway.upstream.background import BackgroundTasks, is_cancelled
from modelport.gateway.upstream.outlier_detection import (
    UNREACHABLE,
    Endpoint,
    EndpointFailed,
    FailureKind,
    ServerError,
    choose,
    ejection_seconds,
    is_outlier,
    is_stalled,
    may_eject,
    slow_seconds,
)
from modelport.gateway.upstream.retries import IDEMPOTENT, RetryBudget

log = structlog.get_logger("modelport.upstream")

T = TypeVar("T")

#: The interval between checks of endpoints with requests in flight.
WATCH_SECONDS = 0.25
#: An endpoint with requests in flight is probed after this time without a response.
STALL_SECONDS = 0.5
#: The time limit of a probe, unless the endpoint is the last one.
PROBE_SECONDS = 2.0
#: The longest interval between probes of an ejected endpoint.
MAX_PROBE_INTERVAL_SECONDS = 2.0


class EndpointPool:
    """The endpoints of one model version. Created, used and closed on the event loop."""

    def __init__(
        self,
        model_name: str,
        addresses: Sequence[str],
        probe: Callable[[Endpoint], Awaitable[object]],
        *,
        timeout_seconds: float,
        connect_timeout_seconds: float,
        outlier_detection: OutlierDetection | None = None,
        reset: Callable[[Endpoint], object] = lambda _: None,
    ) -> None:
        """``probe`` raises unless the endpoint would serve. ``reset`` drops the connections to an
        endpoint, so that the next request opens a new one.
        """
        self._model = model_name
        self.endpoints = tuple(Endpoint(address) for address in addresses)
        self._probe = probe
        self._reset = reset
        self._settings = outlier_detection or OutlierDetection()
        self._timeout_seconds = timeout_seconds
        self._connect_seconds = connect_timeout_seconds
        self._turn = 0
        self._retries = RetryBudget()
        self._background = BackgroundTasks(model_name)
        self._watching = False
        self._decayed_at = time.monotonic()
        self._closed = False
        #: Why no endpoint can be asked; empty unless all are ejected.
        self.problem = ""

    async def start(self) -> None:
        """Probe every endpoint, so that the first requests go to endpoints that serve.

        Raises:
            Unavailable: no endpoint serves.
        """
        probes = (self._failure(endpoint, self._connect_seconds) for endpoint in self.endpoints)
        failures = await asyncio.gather(*probes)
        for endpoint, failed in zip(self.endpoints, failures, strict=True):
            if failed is not None and not endpoint.ejected:
                self._eject(endpoint, failed)
        if self.problem:
            raise Unavailable(self.problem)

    async def call(
        self,
        attempt: Callable[[Endpoint, Deadline], Awaitable[T]],
        deadline: Deadline,
        retried: Collection[FailureKind] = IDEMPOTENT,
    ) -> T:
        """Get the response of one endpoint, or of a second one if the first fails.

        ``attempt`` gets the endpoint and the earlier of ``deadline`` and the route's timeout, and
        is cancelled when that has passed. ``retried``: the failures that allow a second attempt.

        Raises:
            TimedOut: no response in time.
            QueueFull: the queues of all endpoints tried are full.
            Unavailable: no endpoint can be reached or is ready; raised at once while all are
                ejected.
            Internal: the response is damaged, or the server failed.
            ModelportError: the server's error for the request.
        """
        limit = deadline.earliest(self._timeout_seconds)
        self._retries.earn()
        self._turn += 1
        endpoint = choose(self.endpoints, self._turn, None)
        if endpoint is None:
            raise Unavailable(self.problem)
        try:
            return await self._try(endpoint, attempt, limit, deadline)
        except EndpointFailed as error:
            failed = error
        second = self._second(endpoint, failed.failure) if failed.failure in retried else None
        if second is None or limit.expired or not self._retries.spend():
            self._count_error(endpoint, failed)
            raise self._public(failed) from failed
        try:
            answer = await self._try(second, attempt, limit, deadline)
        except EndpointFailed as error:
            # A failure that repeats elsewhere is caused by the request.
            if error.failure is not failed.failure:
                self._count_error(endpoint, failed)
                self._count_error(second, error)
            raise self._public(error) from error
        self._count_error(endpoint, failed)
        return answer

    async def proceed(
        self,
        endpoint: Endpoint,
        attempt: Callable[[Endpoint, Deadline], Awaitable[T]],
        deadline: Deadline,
    ) -> T:
        """Get a further response of an endpoint that has already answered.

        Raises:
            ModelportError: as ``call``.
        """
        limit = deadline.earliest(self._timeout_seconds)
        try:
            return await self._try(endpoint, attempt, limit, deadline)
        except EndpointFailed as error:
            self._count_error(endpoint, error)
            raise self._public(error) from error

    def _second(self, failed: Endpoint, failure: FailureKind) -> Endpoint | None:
        second = choose(self.endpoints, self._turn, failed)
        if second is None and failure is FailureKind.DROPPED and not failed.ejected:
            return failed  # probably an expired idle connection; the next one is new
        return second

    async def _try(
        self,
        endpoint: Endpoint,
        attempt: Callable[[Endpoint, Deadline], Awaitable[T]],
        limit: Deadline,
        deadline: Deadline,
    ) -> T:
        time_limit = TimeLimit(limit.remaining())
        endpoint.waiting[time_limit] = began = time.monotonic()
        moved = False
        if not self._watching:
            self._watching = True
            self._background.start(self._watch)
        try:
            with time_limit:
                try:
                    answer = await attempt(endpoint, limit)
                finally:
                    moved = endpoint.waiting.pop(time_limit, None) is None
        except EndpointFailed as error:
            self._failed(endpoint, error)
            raise
        except (TimeoutError, TimedOut) as error:
            if moved:  # the endpoint was ejected meanwhile
                raise EndpointFailed(FailureKind.HUNG) from error
            failed = EndpointFailed(FailureKind.HUNG)
            routes_own = limit is not deadline and (time_limit.expired or limit.expired)
            waited = math.inf if routes_own else time.monotonic() - began
            self._failed(endpoint, failed, waited)
            raise failed from error
        except QueueFull as error:
            failed = EndpointFailed(FailureKind.FULL, error=error)
            self._failed(endpoint, failed)
            raise failed from error
        except ServerError as error:
            raise EndpointFailed(FailureKind.ERRORED, str(error), error) from error
        except ModelportError:  # caused by the request
            self._answered(endpoint, began)
            raise
        except asyncio.CancelledError:
            # Many clients do not send their deadline, but disconnect.
            waited = time.monotonic() - began
            if waited > STALL_SECONDS and not self._closed:
                self._failed(endpoint, EndpointFailed(FailureKind.HUNG), waited)
            raise
        self._answered(endpoint, began)
        return answer

    def _public(self, error: EndpointFailed) -> ModelportError:
        if error.error is not None:
            return error.error
        if error.failure is FailureKind.HUNG:
            return TimedOut()
        message = f"the server that runs '{self._model}' {error}"
        return Internal(message) if error.failure is FailureKind.DAMAGED else Unavailable(message)

    # -- outlier detection ------------------------------------------------------------------------

    def _answered(self, endpoint: Endpoint, began: float) -> None:
        now = time.monotonic()
        endpoint.count_answer(now, now - began, self._settings)
        if now - began <= endpoint.slow_seconds:
            endpoint.slow = 0
            endpoint.trial = False
            return
        endpoint.slow += 1
        enough = endpoint.trial or endpoint.slow >= self._settings.consecutive_5xx
        if enough and self._may_eject(endpoint, FailureKind.SLOW):
            self._eject(endpoint, EndpointFailed(FailureKind.SLOW))

    def _count_error(self, endpoint: Endpoint, error: EndpointFailed) -> None:
        """Count a server's own error, once it is known not to be caused by the request."""
        if error.failure is FailureKind.ERRORED:
            self._failed(endpoint, error)

    def _failed(self, endpoint: Endpoint, error: EndpointFailed, waited: float = math.inf) -> None:
        """Count a failure and eject the endpoint, or probe it, if it has failed too often.

        ``waited``: the time waited, if the limit was the client's or the server's own. It proves a
        fault of the endpoint only if others respond in half the time; otherwise a probe decides.
        """
        settings, failure = self._settings, error.failure
        endpoint.count_failure(time.monotonic(), settings)
        others = [each for each in self.endpoints if each is not endpoint and not each.ejected]
        if endpoint.ejected or not is_outlier(endpoint, failure, others, settings):
            return
        certain = waited == math.inf or any(
            each.last_answer > endpoint.failing_since and waited > 2 * each.latency_seconds
            for each in others
        )
        if certain and self._may_eject(endpoint, failure):
            self._eject(endpoint, error)
        else:
            self._suspect(endpoint, self._connect_seconds)

    def _may_eject(self, endpoint: Endpoint, failure: FailureKind) -> bool:
        if endpoint.ejected or not (self._settings.enabled or failure in UNREACHABLE):
            return False
        return may_eject(failure, self.endpoints, self._settings)

    def _suspect(self, endpoint: Endpoint, seconds: float) -> None:
        if not endpoint.suspected and self._settings.enabled:
            endpoint.suspected = True
            self._background.start(self._decide, endpoint, seconds)

    async def _decide(self, endpoint: Endpoint, seconds: float) -> None:
        """Eject an endpoint that fails a probe; the last one only if it answers no request
        either."""
        asked = time.monotonic()
        failed = await self._failure(endpoint, seconds)
        endpoint.suspected = False
        silent = failed is not None and failed.failure is FailureKind.SILENT
        if failed is None or endpoint.ejected or (silent and endpoint.last_answer > asked):
            return
        if any(each is not endpoint and not each.ejected for each in self.endpoints):
            self._eject(endpoint, EndpointFailed(FailureKind.HUNG) if silent else failed)
        elif failed.failure in UNREACHABLE and seconds >= self._connect_seconds:
            self._eject(endpoint, failed)

    def _eject(self, endpoint: Endpoint, error: EndpointFailed) -> None:
        now, settings = time.monotonic(), self._settings
        if now - endpoint.returned_at > settings.max_ejection_time_seconds:
            endpoint.ejections = 0
        endpoint.ejections += 1
        endpoint.ejected, endpoint.trial = True, False
        if all(e.ejected for e in self.endpoints):
            self.problem = str(self._public(error))
        log.warning(
            "an endpoint is ejected", model=self._model, endpoint=endpoint.address,
            reason=str(error), seconds=ejection_seconds(endpoint.ejections, settings),
        )  # fmt: skip
        if error.failure is FailureKind.HUNG:  # send its waiting requests elsewhere
            waiting = list(endpoint.waiting)
            endpoint.waiting.clear()
            for time_limit in waiting:
                time_limit.end()
        self._background.start(self._readmit, endpoint)

    async def _readmit(self, endpoint: Endpoint) -> None:
        await asyncio.sleep(ejection_seconds(endpoint.ejections, self._settings))
        seconds, probes = min(PROBE_SECONDS, self._connect_seconds), 0
        while await self._failure(endpoint, seconds, on_new_connection=True) is not None:
            probes += 1
            wait = ejection_seconds(probes, self._settings)
            await asyncio.sleep(min(wait, MAX_PROBE_INTERVAL_SECONDS))
        endpoint.readmit(time.monotonic())
        self.problem = ""
        log.info("an endpoint is in use again", model=self._model, endpoint=endpoint.address)

    async def _failure(
        self, endpoint: Endpoint, seconds: float, on_new_connection: bool = False
    ) -> EndpointFailed | None:
        """Probe an endpoint; None: it serves."""
        try:
            if on_new_connection:
                self._reset(endpoint)
            answer = await outcome(self._probe(endpoint), seconds)
        except (asyncio.CancelledError, Exception):
            if is_cancelled():
                raise
            log.exception("a probe failed", model=self._model, endpoint=endpoint.address)
            return EndpointFailed(FailureKind.UNREADY)
        return answer if isinstance(answer, EndpointFailed) else None

    async def _watch(self) -> None:
        """Check the endpoints, and repeat while any has requests in flight."""
        while self._watching and not self._closed:
            await asyncio.sleep(WATCH_SECONDS)
            self._inspect(time.monotonic())
            self._watching = any(endpoint.waiting for endpoint in self.endpoints)

    def _inspect(self, now: float) -> None:
        settings, endpoints = self._settings, self.endpoints
        half = now - self._decayed_at >= settings.interval_seconds
        if half:
            self._decayed_at = now
        serving = sum(not endpoint.ejected for endpoint in endpoints)
        for endpoint in endpoints:
            if half:
                endpoint.halve_counts()
            endpoint.slow_seconds = slow_seconds(endpoint, endpoints, settings)
            if endpoint.waiting and not endpoint.ejected and serving > 1:
                self._look_for_stall(endpoint, now)

    def _look_for_stall(self, endpoint: Endpoint, now: float) -> None:
        """Probe an endpoint that does not respond; eject one much slower than the others."""
        if now - max(next(iter(endpoint.waiting.values())), endpoint.last_answer) <= STALL_SECONDS:
            return
        longest = max(STALL_SECONDS, endpoint.slow_seconds)
        if is_stalled(endpoint, now, longest, self._settings) and self._may_eject(
            endpoint, FailureKind.HUNG
        ):
            self._eject(endpoint, EndpointFailed(FailureKind.HUNG))
        else:
            self._suspect(endpoint, min(PROBE_SECONDS, self._connect_seconds))

    def close(self) -> None:
        """Stop probing."""
        self._closed = True
        self._background.cancel()


async def outcome(question: Awaitable[T], seconds: float) -> T | EndpointFailed:
    """The endpoint's answer to a question that is no request, or its failure."""
    try:
        async with asyncio.timeout(seconds):
            return await question
    except EndpointFailed as error:
        return error
    except (TimeoutError, TimedOut):
        return EndpointFailed(FailureKind.SILENT)
    except ModelportError as error:
        return EndpointFailed(FailureKind.UNREADY, str(error))


def on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on ``loop`` from another thread, such as a loader's."""
    try:
        running = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError:  # the loop is closed
        work.close()
        raise
    return running.result()
