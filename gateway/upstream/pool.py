"""The endpoints of one route: requests are sent to them, retried elsewhere, and probes bring back
an endpoint that was ejected.

A request that met a failing endpoint is tried once more elsewhere, within its deadline and a *retry
budget*. An endpoint that answers nothing for a while, with requests in flight, is probed; if it
does not answer the probe either, it is ejected and those requests are sent elsewhere. The policy
is ``outlier_detection``'s.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

import structlog

from modelport.gateway.errors import Internal, ModelportError, QueueFull, TimedOut, Unavailable
from modelport.gateway.repository.routes import OutlierDetection
from modelport.gateway.runtime.timer_wheel import TimeLimit
from modelport.gateway.types import Deadline
from modelport.gateway.upstream.background import BackgroundTasks, is_cancelled
from modelport.gateway.upstream.outlier_detection import (
    IDEMPOTENT,
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

log = structlog.get_logger("modelport.upstream")

T = TypeVar("T")

#: The retry budget. One attempt may fail for every request that is in flight when a server dies, so
#: there is a reserve; it refills by a tenth of a retry for every request. Over a thousand requests
#: that is at most 1.2 attempts for each.
RESERVED_RETRIES = 100.0
EARNED_PER_REQUEST = 0.1
#: How often endpoints with requests in flight are looked at.
WATCH_SECONDS = 0.25
#: An endpoint without an answer for so long, and with requests in flight, is probed.
STALL_SECONDS = 0.5
#: The longest that a probe may take which decides about an endpoint beside others.
PROBE_SECONDS = 2.0
#: The longest time from one failed probe of an ejected endpoint to the next.
MAX_PROBE_INTERVAL_SECONDS = 2.0


class EndpointPool:
    """The endpoints that serve one model version. Made, used and closed on the event loop."""

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
        """``probe`` asks an endpoint whether it would serve; it raises if not. ``reset`` gives up
        the connections to an endpoint, so that the next request opens a new one."""
        self._model = model_name
        self.endpoints = tuple(Endpoint(address) for address in addresses)
        self._probe = probe
        self._reset = reset
        self._settings = outlier_detection or OutlierDetection()
        self._timeout_seconds = timeout_seconds
        self._connect_seconds = connect_timeout_seconds
        self._turn = 0
        self._retries = RESERVED_RETRIES
        self._background = BackgroundTasks(model_name)
        self._watching: asyncio.TimerHandle | None = None
        self._decayed_at = time.monotonic()
        self._closed = False
        #: Why nothing can be asked: every endpoint is ejected. Empty while one is not.
        self.problem = ""

    async def start(self) -> None:
        """Probe every endpoint, so that the first requests meet those that serve.

        Raises:
            Unavailable: none does.
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
        """The answer of one endpoint, or of a second one if the first fails.

        ``attempt`` gets the endpoint and the earliest of ``deadline`` and the route's timeout, and
        is cancelled when that has passed. ``retried``: the failures after which a second endpoint
        may be asked.

        Raises:
            TimedOut: no answer came in time.
            QueueFull: the queue of every endpoint that was asked is full.
            Unavailable: no endpoint can be reached, or none is ready; at once while all are
                ejected.
            Internal: the answer is damaged, or the server failed.
            ModelportError: what the server said of the request.
        """
        limit = deadline.earliest(self._timeout_seconds)
        self._retries = min(RESERVED_RETRIES, self._retries + EARNED_PER_REQUEST)
        self._turn += 1
        endpoint = choose(self.endpoints, self._turn, None)
        if endpoint is None:
            raise Unavailable(self.problem)
        try:
            return await self._try(endpoint, attempt, limit, deadline)
        except EndpointFailed as error:
            failed = error
        second = self._second(endpoint, failed.failure) if failed.failure in retried else None
        if second is None or self._retries < 1.0 or limit.expired:
            self._count_error(endpoint, failed)
            raise self._public(failed) from failed
        self._retries -= 1.0
        try:
            answer = await self._try(second, attempt, limit, deadline)
        except EndpointFailed as error:
            # What fails everywhere is the request's own doing.
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
        """One more answer of an endpoint that has answered already; nobody else can give it.

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
            return failed  # the connection was idle for too long; the next is a new one
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
        if self._watching is None:
            self._watch()
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
        except ModelportError:  # the request is to blame
            self._answered(endpoint, began)
            raise
        except asyncio.CancelledError:
            # Many clients do not tell their deadline: they hang up.
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
        said = f"the server that runs '{self._model}' {error}"
        return Internal(said) if error.failure is FailureKind.DAMAGED else Unavailable(said)

    # -- outlier detection ------------------------------------------------------------------------

    def _answered(self, endpoint: Endpoint, began: float) -> None:
        now = time.monotonic()
        endpoint.count_answer(now, now - began)
        if now - began <= endpoint.slow_seconds:
            endpoint.slow = 0
            endpoint.trial = False
            return
        endpoint.slow += 1
        enough = endpoint.trial or endpoint.slow >= self._settings.consecutive_5xx
        if enough and self._may_eject(endpoint, FailureKind.SLOW):
            self._eject(endpoint, EndpointFailed(FailureKind.SLOW))

    def _count_error(self, endpoint: Endpoint, error: EndpointFailed) -> None:
        """Count a server's own error, once it is known that it is not the request's doing."""
        if error.failure is FailureKind.ERRORED:
            self._failed(endpoint, error)

    def _failed(self, endpoint: Endpoint, error: EndpointFailed, waited: float = math.inf) -> None:
        """Count one failure.

        ``waited``: how long, where that was the client's or the server's own limit. It says
        something of the endpoint only where others answer meanwhile, in half the time; else a
        probe decides.
        """
        endpoint.count_failure(time.monotonic())
        settings, failure = self._settings, error.failure
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
        return may_eject(endpoint, failure, self.endpoints, self._settings)

    def _suspect(self, endpoint: Endpoint, seconds: float) -> None:
        if not endpoint.suspected and self._settings.enabled:
            endpoint.suspected = True
            self._background.start(self._decide, endpoint, seconds)

    async def _decide(self, endpoint: Endpoint, seconds: float) -> None:
        """Eject an endpoint that does not pass a probe; the last one only if it answers nobody."""
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
        if error.failure is FailureKind.HUNG:  # what waits there is sent elsewhere
            waiting = list(endpoint.waiting)
            endpoint.waiting.clear()
            for time_limit in waiting:
                time_limit.end()
        self._background.start(self._bring_back, endpoint)

    async def _bring_back(self, endpoint: Endpoint) -> None:
        await asyncio.sleep(ejection_seconds(endpoint.ejections, self._settings))
        seconds, probes = min(PROBE_SECONDS, self._connect_seconds), 0
        while await self._failure(endpoint, seconds, on_new_connection=True) is not None:
            probes += 1
            wait = ejection_seconds(probes, self._settings)
            await asyncio.sleep(min(wait, MAX_PROBE_INTERVAL_SECONDS))
        endpoint.come_back(time.monotonic())
        self.problem = ""
        log.info("an endpoint is back", model=self._model, endpoint=endpoint.address)

    async def _failure(
        self, endpoint: Endpoint, seconds: float, on_new_connection: bool = False
    ) -> EndpointFailed | None:
        """A probe's finding; None: the endpoint serves."""
        try:
            if on_new_connection:
                self._reset(endpoint)
            async with asyncio.timeout(seconds):
                await self._probe(endpoint)
        except EndpointFailed as error:
            return error
        except (TimeoutError, TimedOut):
            return EndpointFailed(FailureKind.SILENT)
        except ModelportError as error:
            return EndpointFailed(FailureKind.UNREADY, str(error))
        except (asyncio.CancelledError, Exception):
            if is_cancelled():
                raise
            log.exception("a probe failed", model=self._model, endpoint=endpoint.address)
            return EndpointFailed(FailureKind.UNREADY)
        return None

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._watching = loop.call_later(WATCH_SECONDS, self._look)

    def _look(self) -> None:
        """Look at the endpoints, again and again while any has requests in flight."""
        self._watching = None
        if self._closed:
            return
        try:
            self._inspect(time.monotonic())
        except Exception:
            log.exception("the endpoints of a route cannot be watched", model=self._model)
        if any(endpoint.waiting for endpoint in self.endpoints):
            self._watch()

    def _inspect(self, now: float) -> None:
        settings, endpoints = self._settings, self.endpoints
        half = now - self._decayed_at >= settings.interval_seconds
        if half:
            self._decayed_at = now
        serving = sum(not endpoint.ejected for endpoint in endpoints)
        for endpoint in endpoints:
            if half:
                endpoint.answered /= 2
                endpoint.failed /= 2
            endpoint.slow_seconds = slow_seconds(endpoint, endpoints, settings)
            if endpoint.waiting and not endpoint.ejected and serving > 1:
                self._look_for_stall(endpoint, now)

    def _look_for_stall(self, endpoint: Endpoint, now: float) -> None:
        """Probe an endpoint that answers nothing; eject one that takes much longer than others."""
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
        if self._watching is not None:
            self._watching.cancel()
        self._background.cancel()


def on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """``work``'s result, from a thread beside ``loop``: loaders and ``unload`` run in one."""
    return asyncio.run_coroutine_threadsafe(work, loop).result()
