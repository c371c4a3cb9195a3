"""The endpoints of one route: which is asked next, which is left out, what is tried once more.

The words are Envoy's. An endpoint that fails is *ejected* for a time that doubles (*outlier
detection*); then a *probe*, never a client's request, decides whether it comes back. A request
that met a failing endpoint is tried once more elsewhere, within its deadline and a *retry budget*:
an inference has no effect but its answer, so asking twice is safe. ``choose``, ``ejects`` and
``ejection_seconds`` are pure; ``Pool`` has the effects.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import structlog

from gateway.errors import Internal, ModelportError, TimedOut, Unavailable
from gateway.timers import TimeLimit
from gateway.types import Deadline

log = structlog.get_logger("modelport.upstream")

T = TypeVar("T")

EJECTION_SECONDS = 0.5
MAX_EJECTION_SECONDS = 10.0
#: The retry budget. One attempt may fail for every request that is in flight when a server dies, so
#: there is a reserve; it refills by a tenth of a retry for every request. Over a thousand requests
#: that is at most 1.2 attempts for each.
RESERVED_RETRIES = 100.0
EARNED_PER_REQUEST = 0.1
MAX_REASON = 500


class Failure(Enum):
    """What is wrong with an endpoint; the value is what its clients are told, less the reason."""

    REFUSED = "cannot be reached"
    DROPPED = "closed the connection before the answer was complete"
    UNREADY = "is not ready"
    MISSING = "does not have the model"
    DAMAGED = "gave a damaged answer"
    HUNG = "did not answer in time"


#: So many failures in a row, the last of this kind, eject an endpoint.
PATIENCE = {
    Failure.REFUSED: 1,
    Failure.DROPPED: 2,  # one may be a connection that was idle for too long
    Failure.UNREADY: 3,
    Failure.MISSING: 3,
    Failure.DAMAGED: 3,
    Failure.HUNG: 3,
}
#: Only these eject the last endpoint that is left. The others may be one client's doing: then a
#: probe decides, and it must find one of these.
_UNREACHABLE = (Failure.REFUSED, Failure.DROPPED)


class EndpointFailed(Exception):
    """What an attempt raises when the endpoint is to blame. ``reason`` is public, and may be empty.

    It never leaves the pool.
    """

    def __init__(self, failure: Failure, reason: str = "") -> None:
        super().__init__(f"{failure.value}: {reason}" if reason else failure.value)
        self.failure = failure


@dataclass(slots=True, eq=False)
class Endpoint:
    """``host:port`` and how it fares. The pool alone changes it, on the event loop."""

    address: str
    in_flight: int = 0
    #: In a row, since its last answer.
    failures: int = 0
    #: In a row, since its last answer: each doubles the time.
    ejections: int = 0
    ejected: bool = False
    #: A probe is to decide whether it is ejected.
    suspected: bool = False


def choose(endpoints: Sequence[Endpoint], turn: int, tried: Endpoint | None) -> Endpoint | None:
    """The endpoint with the least in flight; among equals they take turns. None: all are ejected.

    ``tried`` has just failed and is left out.
    """
    best: Endpoint | None = None
    for index in range(len(endpoints)):
        endpoint = endpoints[(turn + index) % len(endpoints)]
        if endpoint.ejected or endpoint is tried:
            continue
        if best is None or endpoint.in_flight < best.in_flight:
            best = endpoint
    return best


def ejects(failure: Failure, failures: int, others: bool) -> bool:
    """Whether an endpoint is ejected by its ``failures``-th failure in a row.

    ``others``: whether one that is not ejected would be left.
    """
    return failures >= PATIENCE[failure] and (others or failure in _UNREACHABLE)


def ejection_seconds(ejections: int) -> float:
    """How long the ``ejections``-th ejection in a row lasts; the first is 1."""
    return min(MAX_EJECTION_SECONDS, EJECTION_SECONDS * 2.0 ** min(ejections - 1, 30))


class Pool:
    """The endpoints that serve one model version. Made, used and closed on the event loop."""

    def __init__(
        self,
        model_name: str,
        addresses: Sequence[str],
        probe: Callable[[Endpoint], Awaitable[object]],
        *,
        timeout_seconds: float,
        connect_timeout_seconds: float,
    ) -> None:
        """``probe`` asks an endpoint whether it would serve; it raises if not."""
        self._model = model_name
        self.endpoints = tuple(Endpoint(address) for address in addresses)
        self._probe = probe
        self._timeout_seconds = timeout_seconds
        self._probe_seconds = connect_timeout_seconds
        self._turn = 0
        self._retries = RESERVED_RETRIES
        self._probing: set[asyncio.Task[None]] = set()
        #: Why nothing can be asked: every endpoint is ejected. Empty while one is not.
        self.problem = ""

    async def start(self) -> None:
        """Probe every endpoint, so that the first requests meet those that serve.

        Raises:
            Unavailable: none does.
        """
        failures = await asyncio.gather(*map(self._failure, self.endpoints))
        for endpoint, failed in zip(self.endpoints, failures, strict=True):
            if failed is not None:
                self._eject(endpoint, failed)
        if self.problem:
            raise Unavailable(self.problem)

    async def call(
        self, attempt: Callable[[Endpoint, Deadline], Awaitable[T]], deadline: Deadline
    ) -> T:
        """The answer of one endpoint, or of a second one if the first fails.

        ``attempt`` gets the endpoint and the earliest of ``deadline`` and the route's timeout, and
        is cancelled when that has passed.

        Raises:
            TimedOut: no answer came in time.
            Unavailable: no endpoint can be reached, or none is ready; at once while all are
                ejected.
            Internal: the answer is damaged.
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
            second = self._second(endpoint, error.failure)
            if second is None or self._retries < 1.0 or limit.expired:
                raise self._public(error) from error
            self._retries -= 1.0
        try:
            return await self._try(second, attempt, limit, deadline)
        except EndpointFailed as error:
            raise self._public(error) from error

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
            raise self._public(error) from error

    def _second(self, failed: Endpoint, failure: Failure) -> Endpoint | None:
        if failure is Failure.HUNG:
            return None
        self._turn += 1
        second = choose(self.endpoints, self._turn, failed)
        if second is None and failure is Failure.DROPPED and not failed.ejected:
            return failed  # the connection was idle for too long; the next is a new one
        return second

    async def _try(
        self,
        endpoint: Endpoint,
        attempt: Callable[[Endpoint, Deadline], Awaitable[T]],
        limit: Deadline,
        deadline: Deadline,
    ) -> T:
        endpoint.in_flight += 1
        try:
            with TimeLimit(limit.remaining()):
                answer = await attempt(endpoint, limit)
        except EndpointFailed as error:
            self._failed(endpoint, error)
            raise
        except (TimeoutError, TimedOut) as error:
            # A deadline of the client's own says nothing of the server.
            if limit is not deadline and limit.expired:
                failed = EndpointFailed(Failure.HUNG)
                self._failed(endpoint, failed)
                raise failed from error
            raise TimedOut from error
        except ModelportError:
            endpoint.failures = endpoint.ejections = 0
            raise
        finally:
            endpoint.in_flight -= 1
        endpoint.failures = endpoint.ejections = 0
        return answer

    def _public(self, error: EndpointFailed) -> ModelportError:
        if error.failure is Failure.HUNG:
            return TimedOut()
        said = f"the server that runs '{self._model}' {error}"
        return Internal(said) if error.failure is Failure.DAMAGED else Unavailable(said)

    # -- outlier detection ----------------------------------------------------------------------

    def _failed(self, endpoint: Endpoint, error: EndpointFailed) -> None:
        endpoint.failures += 1
        others = any(not e.ejected for e in self.endpoints if e is not endpoint)
        if endpoint.ejected or endpoint.failures < PATIENCE[error.failure]:
            return
        if ejects(error.failure, endpoint.failures, others):
            self._eject(endpoint, error)
        elif not endpoint.suspected:
            endpoint.suspected = True
            self._in_background(self._decide(endpoint))

    async def _decide(self, endpoint: Endpoint) -> None:
        """Eject the last endpoint if it answers nobody."""
        failed = await self._failure(endpoint)
        endpoint.suspected = False
        if failed is not None and failed.failure in _UNREACHABLE and not endpoint.ejected:
            self._eject(endpoint, failed)

    def _eject(self, endpoint: Endpoint, error: EndpointFailed) -> None:
        endpoint.ejected = True
        endpoint.ejections += 1
        if all(e.ejected for e in self.endpoints):
            self.problem = str(self._public(error))
        log.warning(
            "an endpoint is ejected", model=self._model, endpoint=endpoint.address,
            reason=str(error), seconds=ejection_seconds(endpoint.ejections),
        )  # fmt: skip
        self._in_background(self._bring_back(endpoint))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._probing.add(task)
        task.add_done_callback(self._probing.discard)

    async def _bring_back(self, endpoint: Endpoint) -> None:
        while True:
            await asyncio.sleep(ejection_seconds(endpoint.ejections))
            failed = await self._failure(endpoint)
            if failed is None:
                break
            endpoint.ejections += 1
        endpoint.ejected = False
        endpoint.failures = 0
        self.problem = ""
        log.info("an endpoint is back", model=self._model, endpoint=endpoint.address)

    async def _failure(self, endpoint: Endpoint) -> EndpointFailed | None:
        """What a probe finds wrong; None: nothing."""
        try:
            async with asyncio.timeout(self._probe_seconds):
                await self._probe(endpoint)
        except EndpointFailed as error:
            return error
        except TimeoutError:
            return EndpointFailed(Failure.REFUSED, "no answer")
        except ModelportError as error:
            return EndpointFailed(Failure.UNREADY, str(error))
        except Exception:
            log.exception("a probe failed", model=self._model, endpoint=endpoint.address)
            return EndpointFailed(Failure.UNREADY)
        return None

    def close(self) -> None:
        """Stop probing."""
        for task in self._probing:
            task.cancel()


def on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """``work``'s result, from a thread beside ``loop``: loaders and ``unload`` run in one."""
    return asyncio.run_coroutine_threadsafe(work, loop).result()


_FOLDERS = re.compile(r"(?<![\w./])/(?:[^\s\"':/]+/)+")
_ADDRESSES = re.compile(r"(?:ipv[46]:)?(?:\[[0-9a-f:%]+\]|\d+\.\d+\.\d+\.\d+)(?::\d+)?")


def public(text: str) -> str:
    """The first line of what another server says, without folders and addresses."""
    lines = text.strip().splitlines() or [""]
    return _ADDRESSES.sub("the server", _FOLDERS.sub("", lines[0]))[:MAX_REASON]
