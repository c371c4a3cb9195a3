"""The traffic of one rollout: which side answers a request, and what is counted of it.

A split stands before the inference service while a rollout runs. It diverts requests that name no
version, or the baseline's label; a request that names a version by number, or that belongs to a
sequence, goes where it always went. Only the event loop uses it, so ``route`` takes effect between
two requests.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import NamedTuple

from modelport.gateway.errors import Code, ModelportError, Unavailable
from modelport.gateway.rollout.assignment import RequestAssignment
from modelport.gateway.rollout.counts import SideCounts, StageCounts, latency_bucket
from modelport.gateway.rollout.plan import RolloutPlan, RolloutSide, StageKind
from modelport.gateway.rollout.request_routing import CURRENT
from modelport.gateway.runtime.timer_wheel import TimeLimit
from modelport.gateway.types import Deadline, Infer, InferRequest, InferResponse, Tensor, Timing

#: Parameter of requests whose answer depends on earlier ones.
_SEQUENCE = "sequence_id"
#: Errors that a request brings about itself.
_CLIENT_ERRORS = (Code.INVALID_ARGUMENT, Code.UNSUPPORTED)
#: Longest time that a request in flight at the candidate may take after a rollback, and the part
#: of its own deadline; then the baseline answers it.
STOP_SECONDS = 5.0
STOP_SHARE = 0.5
#: As long as never, for a limit that only ``route`` ends.
_NEVER_SECONDS = 1e9


class StageTraffic(NamedTuple):
    """The routing of one stage, and its counts."""

    number: int
    kind: StageKind
    share: float
    counts: StageCounts

    @property
    def canary_share(self) -> float:
        """The share of requests that the candidate answers."""
        return self.share if self.kind is StageKind.CANARY else 0.0


class TrafficSplit:
    """An ``Infer`` before both sides of a rollout.

    Args:
        ask: answers a request for a version, which it counts as usual.
    """

    def __init__(self, plan: RolloutPlan, ask: Infer) -> None:
        self.plan = plan
        self._ask = ask
        self._assignment = RequestAssignment(plan)
        #: Whether requests without a version belong to the rollout.
        self._default = plan.default_version in (0, plan.baseline.version)
        self.counts: dict[int, StageCounts] = {}
        self._stage = StageTraffic(0, StageKind.SHADOW, 0.0, StageCounts())
        #: Limits of the requests in flight at the candidate, with their deadlines.
        self._on_candidate: dict[TimeLimit, Deadline] = {}

    def route(self, number: int, kind: StageKind, share: float) -> None:
        """Route requests from now on as stage ``number`` does; a share of 0 stops the candidate.

        Requests in flight at a candidate that is stopped have ``STOP_SECONDS`` to finish there.
        """
        counts = self.counts.setdefault(number, StageCounts())
        self._stage = StageTraffic(number, kind, share, counts)
        if not self._stage.canary_share:
            loop = asyncio.get_running_loop()
            for limit, deadline in self._on_candidate.items():
                remaining = deadline.remaining()
                seconds = STOP_SECONDS
                if remaining is not None:
                    seconds = min(seconds, remaining * STOP_SHARE)
                loop.call_later(seconds, self._end, limit)

    def _end(self, limit: TimeLimit) -> None:
        if limit in self._on_candidate:
            limit.end()

    def diverts(self, request: InferRequest) -> bool:
        """Whether ``request`` belongs to the rollout."""
        if request.parameters and _SEQUENCE in request.parameters:
            return False
        if not request.model_version or request.label == "":
            return self._default
        return request.label is not None and request.label == self.plan.label

    async def infer(
        self, request: InferRequest, deadline: Deadline, step: bool = False
    ) -> InferResponse:
        """Answer ``request``, which this split diverts, by one of the sides.

        If the candidate fails, the baseline answers within the same deadline. A ``step`` of an
        ensemble says nothing to the client about the version that answered.

        Raises:
            ModelportError: the baseline failed, or the deadline has passed.
        """
        stage, key = self._stage, self._assignment.key(request)
        share = stage.canary_share
        if share and self._assignment.candidate_serves(key, share):
            try:
                response = await self._at_candidate(stage, request, deadline, step)
            except ModelportError as error:
                response = await self._fall_back(stage, request, deadline, step, error)
        else:
            response = await self._at_baseline(stage, request, deadline, step)
        response.model_name = request.model_name
        return response

    async def _at_candidate(
        self, stage: StageTraffic, request: InferRequest, deadline: Deadline, step: bool
    ) -> InferResponse:
        counts, limit = stage.counts.candidate, TimeLimit(_NEVER_SECONDS)
        self._on_candidate[limit] = deadline
        started = time.perf_counter_ns()
        try:
            with limit:
                response = await self._of(self.plan.candidate, request, deadline, step)
        except TimeoutError:
            if not limit.expired:
                raise
            raise Unavailable("the candidate did not answer before its rollback") from None
        finally:
            del self._on_candidate[limit]
        self._answered(counts, time.perf_counter_ns() - started)
        return response

    async def _at_baseline(
        self, stage: StageTraffic, request: InferRequest, deadline: Deadline, step: bool
    ) -> InferResponse:
        started = time.perf_counter_ns()
        try:
            response = await self._of(self.plan.baseline, request, deadline, step)
        except ModelportError as error:
            if error.code not in _CLIENT_ERRORS:
                _failed(stage.counts, is_candidate=False)
            raise
        self._answered(stage.counts.baseline, time.perf_counter_ns() - started)
        return response

    async def _fall_back(
        self,
        stage: StageTraffic,
        request: InferRequest,
        deadline: Deadline,
        step: bool,
        error: ModelportError,
    ) -> InferResponse:
        """Answer by the baseline after the candidate's ``error``.

        The error is the candidate's, unless the baseline too finds the request invalid.
        """
        if deadline.expired:
            _failed(stage.counts, is_candidate=True)
            raise error
        try:
            response = await self._of(self.plan.baseline, request, deadline, step)
        except ModelportError as again:
            if error.code not in _CLIENT_ERRORS or again.code not in _CLIENT_ERRORS:
                _failed(stage.counts, is_candidate=True)
            raise
        _failed(stage.counts, is_candidate=True)
        return response

    async def _of(
        self, side: RolloutSide, request: InferRequest, deadline: Deadline, step: bool
    ) -> InferResponse:
        """The answer of ``side``; ``request`` itself stays as it is."""
        routing = CURRENT.get()
        if routing is not None and not step:
            own = side.model == request.model_name
            routing.answered = str(side.version) if own else f"{side.model}/{side.version}"
        response = await self._ask(addressed(request, side), deadline)
        response.model_version = side.version
        return response

    def _answered(self, counts: SideCounts, nanoseconds: int) -> None:
        counts.requests += 1
        bucket = latency_bucket(nanoseconds)
        counts.latency[bucket] = counts.latency.get(bucket, 0) + 1
        milliseconds, limits = nanoseconds / 1e6, self.plan.limits
        for name, most in (("p50_ms", limits.p50_ms), ("p99_ms", limits.p99_ms)):
            if most is not None and milliseconds > most:
                counts.over_limit[name] = counts.over_limit.get(name, 0) + 1


def addressed(request: InferRequest, side: RolloutSide) -> InferRequest:
    """A copy of ``request`` for ``side``, because validation reshapes a request's tensors."""
    return replace(
        request,
        model_name=side.model,
        model_version=side.version,
        label=None,
        inputs=[Tensor(each.name, each.datatype, each.data) for each in request.inputs],
        timing=Timing(),
    )


def _failed(counts: StageCounts, *, is_candidate: bool) -> None:
    side = counts.candidate if is_candidate else counts.baseline
    side.requests += 1
    side.errors += 1
    counts.errors.total += 1
    counts.errors.candidate += is_candidate
