"""The traffic of one rollout: which side answers a request, and what is counted of it.

A split stands before the inference service while a rollout runs. It diverts requests that name no
version, or the baseline's label; a request that names a version by number, or that belongs to a
sequence, goes where it always went. Only the event loop uses it, so ``route`` takes effect between
two requests.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from modelport.gateway.errors import Code, ModelportError, TimedOut, Unavailable
from modelport.gateway.models.inference_service import InferenceService
from modelport.gateway.rollout.plan import RolloutPlan, RolloutSide, StageKind
from modelport.gateway.rollout.statistics.counts import StageCounts
from modelport.gateway.rollout.traffic import examples
from modelport.gateway.rollout.traffic.answer_comparison import (
    AnswerComparison,
    ComparedAnswers,
    count_keys,
)
from modelport.gateway.rollout.traffic.assignment import RequestAssignment
from modelport.gateway.rollout.traffic.feedback import LabelledRequests
from modelport.gateway.rollout.traffic.request_events import AssignedRequest, RequestEvents
from modelport.gateway.rollout.traffic.request_routing import CURRENT
from modelport.gateway.rollout.traffic.shadow import ShadowCopy, ShadowQueue, UncomparedCopy
from modelport.gateway.rollout.traffic.sides import StageTraffic, addressed, copies_of
from modelport.gateway.runtime.timer_wheel import TimeLimit
from modelport.gateway.telemetry import request_record
from modelport.gateway.types import (
    Answer,
    Deadline,
    InferRequest,
    InferResponse,
    Tensor,
    finished,
)

#: Parameter of requests whose answer depends on earlier ones.
_SEQUENCE = "sequence_id"
#: Errors that a request brings about itself.
_CLIENT_ERRORS = (Code.INVALID_ARGUMENT, Code.UNSUPPORTED)
#: Longest time that a request in flight at the candidate may take after a rollback, and the part
#: of its own deadline; then the baseline answers it.
STOP_SECONDS = 5.0
STOP_SHARE = 0.5
#: Most answers that wait to be counted.
MAX_UNCOUNTED = 16
#: As long as never, for a limit that only ``route`` ends.
_NEVER_SECONDS = 1e9
#: Ids of the rollouts whose candidate answers the current request. If that is an ensemble around
#: the model itself, the step is not diverted again.
_DIVERTING: ContextVar[frozenset[str]] = ContextVar("diverting", default=frozenset())


@dataclass(slots=True)
class _DivertedRequest:
    """A request that the split assigns to a side."""

    request: InferRequest
    deadline: Deadline
    step: bool
    assigned: AssignedRequest
    #: By ``time.monotonic``.
    started: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


class ComparedCopy(NamedTuple):
    """The comparison of the answers of both sides; ``scores`` are the candidate's of a copy."""

    answers: ComparedAnswers
    scores: Sequence[int]
    baseline: Sequence[Tensor]
    candidate: Sequence[Tensor]


class TrafficSplit:
    """An ``Infer`` before both sides of a rollout."""

    def __init__(self, plan: RolloutPlan, service: InferenceService) -> None:
        self.plan = plan
        #: The counts of each stage in this process.
        self.counts: dict[int, StageCounts] = {}
        #: The first requests whose answers disagreed (``examples``).
        self.examples: list[dict[str, Any]] = []
        self.comparison = AnswerComparison(plan)
        self._events = RequestEvents(plan)
        #: Answered requests that are not counted yet, and their latencies in seconds.
        self._uncounted: list[tuple[AssignedRequest, float]] = []
        self._labelled = LabelledRequests(plan)
        self._learns = plan.limits.max_quality_ratio is not None
        self._reads_decisions = self._learns or self.comparison.decides
        self._service = service
        self._assignment = RequestAssignment(plan)
        #: Whether requests without a version belong to the rollout.
        self._default = plan.moves_default
        self._stage = StageTraffic(0, StageKind.SHADOW, 0.0, StageCounts())
        #: The assignment of every request without a key to the baseline.
        self._to_baseline = AssignedRequest(self._stage, False)
        self._until = math.inf
        #: Limits of the requests in flight at the candidate, with their deadlines.
        self._on_candidate: dict[TimeLimit, Deadline] = {}
        self._copies = ShadowQueue(service, self, (plan.baseline, plan.candidate))

    def route(self, number: int, kind: StageKind, share: float, until: float = math.inf) -> None:
        """Route requests from now on as stage ``number`` does; a share of 0 stops the candidate.

        Requests in flight at a candidate that is stopped have ``STOP_SECONDS`` to finish there;
        copies are dropped.

        Args:
            until: the time of ``time.monotonic`` from which nothing new goes to the candidate. A
                process that was stopped for a while may serve requests before any timer runs.
        """
        self._until = until
        before = self._stage
        counts = self.counts.setdefault(number, StageCounts())
        self._stage = StageTraffic(number, kind, share, counts)
        self._to_baseline = AssignedRequest(self._stage, False)
        if not share or kind is not before.kind:
            self._copies.stop()
        if not self._stage.canary_share:
            loop = asyncio.get_running_loop()
            for limit, deadline in self._on_candidate.items():
                remaining = deadline.remaining()
                seconds = math.inf if remaining is None else remaining * STOP_SHARE
                loop.call_later(min(STOP_SECONDS, seconds), self._end, limit)

    def _end(self, limit: TimeLimit) -> None:
        if limit in self._on_candidate:
            limit.end()

    @property
    def problem(self) -> str:
        """The reason why this stage compares nothing; empty while it does."""
        return self._copies.problem

    def settle(self) -> None:
        """Count the answers so far, and the copies that have ended."""
        self._count_answers()
        self._copies.settle()

    def close(self) -> None:
        """Drop all copies; requests in flight finish where they are."""
        self._copies.stop()

    # -- requests of clients --------------------------------------------------------------------

    def diverts(self, request: InferRequest) -> bool:
        """Whether ``request`` belongs to the rollout."""
        in_sequence = request.parameters and _SEQUENCE in request.parameters
        if in_sequence or self.plan.id in _DIVERTING.get():
            return False
        if not request.model_version or request.label == "":
            return self._default
        return request.label is not None and request.label == self.plan.label

    def infer(
        self, request: InferRequest, deadline: Deadline, step: bool = False
    ) -> Awaitable[InferResponse]:
        """Answer ``request``, which this split diverts, by one of the sides.

        If the candidate fails, the baseline answers within the same deadline. A ``step`` of an
        ensemble says nothing to the client about the version that answered.

        Raises:
            ModelportError: the baseline failed, or the deadline has passed.
        """
        stage, key, started = self._stage, self._assignment.key(request), time.monotonic()
        assigned, copied = self._to_baseline, False
        if started >= self._until:
            pass
        elif stage.kind is StageKind.SHADOW:
            copied = random.random() < stage.share
        elif self._assignment.candidate_serves(key, stage.share):
            assigned = AssignedRequest(stage, True, key)
            return self._by_candidate(_DivertedRequest(request, deadline, step, assigned, started))
        if key:
            assigned = AssignedRequest(stage, False, key)
        diverted = _DivertedRequest(request, deadline, step, assigned, started)
        return self._by_baseline(diverted, copied)

    async def _by_baseline(self, diverted: _DivertedRequest, copied: bool) -> InferResponse:
        """Answer by the baseline; ``copied``: send a copy to the candidate."""
        request = diverted.request
        name = request.model_name
        # Validation reshapes the request's tensors.
        inputs = copies_of(request.inputs) if copied else []
        try:
            response = await finished(self._at_baseline(diverted))
        except asyncio.CancelledError:
            self._abandoned(diverted)
            raise
        except ModelportError as error:
            if error.code not in _CLIENT_ERRORS:
                self._failed(diverted, error)
            raise
        seconds = self._answered(diverted)
        outputs = request.unclassified or response.outputs
        if self._reads_decisions:
            self._note_decisions(diverted, outputs)
        if copied:
            request.inputs = inputs
            self._copy(diverted, outputs, seconds)
        self._copies.advance()
        response.model_name, response.model_version = name, self.plan.baseline.version
        return response

    def _at_baseline(self, diverted: _DivertedRequest) -> Answer:
        request, side = diverted.request, self.plan.baseline
        self._note_side(diverted, side)
        request.model_name, request.model_version = side
        return self._service.run(request, diverted.deadline, diverted.step)

    async def _by_candidate(self, diverted: _DivertedRequest) -> InferResponse:
        """Answer by the candidate, or by the baseline if it fails."""
        request, side = diverted.request, self.plan.candidate
        name, asked = request.model_name, addressed(request, side)
        try:
            response = await self._at_candidate(diverted, asked)
        except asyncio.CancelledError:
            self._abandoned(diverted)
            raise
        except ModelportError as error:
            side = self.plan.baseline
            response = await self._fall_back(diverted, error)
        else:
            seconds = self._answered(diverted)
            outputs = asked.unclassified or response.outputs
            if self._reads_decisions:
                self._note_decisions(diverted, outputs)
            if random.random() * diverted.assigned.stage.share < self.plan.pair:
                request.via = asked.via
                self._copy(diverted, outputs, seconds)
        self._copies.advance()
        response.model_name, response.model_version = name, side.version
        return response

    async def _at_candidate(
        self, diverted: _DivertedRequest, request: InferRequest
    ) -> InferResponse:
        self._note_side(diverted, self.plan.candidate)
        limit = TimeLimit(_NEVER_SECONDS)
        self._on_candidate[limit] = diverted.deadline
        token = _DIVERTING.set(_DIVERTING.get() | {self.plan.id})
        try:
            with limit:
                answer = self._service.run(request, diverted.deadline, diverted.step)
                return await finished(answer)
        except TimeoutError:
            if not limit.expired:
                raise
            raise Unavailable("the candidate did not respond before its rollback") from None
        finally:
            _DIVERTING.reset(token)
            del self._on_candidate[limit]

    async def _fall_back(self, diverted: _DivertedRequest, error: ModelportError) -> InferResponse:
        """Answer by the baseline after the candidate's ``error``.

        The error is the candidate's, unless the baseline too finds the request invalid.
        """
        if diverted.deadline.expired:
            self._failed(diverted, error)
            raise error
        try:
            response = await finished(self._at_baseline(diverted))
        except ModelportError as again:
            if error.code not in _CLIENT_ERRORS or again.code not in _CLIENT_ERRORS:
                self._failed(diverted, error)
            raise
        self._failed(diverted, error)
        return response

    def _note_side(self, diverted: _DivertedRequest, side: RolloutSide) -> None:
        """Note the version that answers, for the client."""
        routing = CURRENT.get()
        if routing is not None and not diverted.step:
            own = side.model == self.plan.model
            routing.answered = str(side.version) if own else f"{side.model}/{side.version}"
            record = request_record.CURRENT.get()
            if record is not None:
                record.side = "candidate" if side == self.plan.candidate else "baseline"

    # -- events of requests -----------------------------------------------------------------------

    def _answered(self, diverted: _DivertedRequest) -> float:
        """Note that a request was answered; return its latency in seconds.

        It is counted after the response, with others, so that no client waits for that.
        """
        seconds = diverted.seconds
        self._uncounted.append((diverted.assigned, seconds))
        if len(self._uncounted) == MAX_UNCOUNTED:
            asyncio.get_running_loop().call_soon(self._count_answers)
        return seconds

    def _count_answers(self) -> None:
        uncounted, self._uncounted = self._uncounted, []
        for assigned, seconds in uncounted:
            self._events.answered(assigned, seconds)

    def _abandoned(self, diverted: _DivertedRequest) -> None:
        self._count_answers()  # the order of events matters
        self._events.abandoned(diverted.assigned, diverted.seconds)

    def _failed(self, diverted: _DivertedRequest, error: ModelportError) -> None:
        self._count_answers()
        if isinstance(error, TimedOut) and diverted.deadline.expired:
            self._events.timed_out(diverted.assigned, diverted.seconds)
        else:
            self._events.failed(diverted.assigned)

    def _note_decisions(self, diverted: _DivertedRequest, outputs: Sequence[Tensor]) -> None:
        """Count the scores of an answer, and remember its decisions until their labels come."""
        request, assigned = diverted.request, diverted.assigned
        counts = assigned.stage.counts
        side = counts.candidate if assigned.is_candidate else counts.baseline
        count_keys(side.scores, self.comparison.scores(outputs))
        if self._learns and (request.id or request.trace):
            decisions = self.comparison.decided(outputs)
            self._labelled.remember(request.id or request.trace, assigned, decisions)

    def _copy(self, diverted: _DivertedRequest, outputs: Sequence[Tensor], seconds: float) -> None:
        """Send a copy to the side that has not answered, once the response is on its way."""
        # Dialects reshape the outputs of a response.
        answer = copies_of(outputs)
        asyncio.get_running_loop().call_soon(self._offer, diverted, answer, seconds)

    def _offer(self, diverted: _DivertedRequest, answer: Sequence[Tensor], seconds: float) -> None:
        """Queue a copy, unless the stage has ended."""
        stage, is_candidate, _ = diverted.assigned
        if self._stage.number == stage.number and self._stage.share:
            other = self.plan.baseline if is_candidate else self.plan.candidate
            self._copies.offer(ShadowCopy(diverted.request, answer, seconds, other, stage))

    def learn(self, row: Mapping[str, Any], complete: bool) -> bool:
        """Count a label that came later; whether its request is known.

        Raises:
            InvalidArgument: the row is malformed.
        """
        judged = self._labelled.judge(row, self._traffic, complete)
        if judged is None:
            return False
        self._count_answers()  # the order of events matters
        for name in judged.criteria:
            self._events.wrong(judged.assigned, name)
        return True

    def has_label(self, request_id: str) -> bool:
        """Whether a label of the request was counted before."""
        return self._labelled.has_label(request_id)

    def _traffic(self, number: int | None) -> StageTraffic | None:
        """The traffic of a stage (None: the current one), if it has begun."""
        if number is None or number == self._stage.number:
            return self._stage
        if not 0 <= number < self._stage.number:
            return None
        counts = self.counts.setdefault(number, StageCounts())
        return StageTraffic(number, *self.plan.stages[number], counts)

    # -- copies ---------------------------------------------------------------------------------

    def compare(self, copy: ShadowCopy, response: InferResponse) -> ComparedCopy:
        """Compare the answer to a copy with the one that the client got, in any thread."""
        of_candidate = copy.side == self.plan.candidate
        outputs = [copy.answer, response.outputs]
        baseline, candidate = outputs if of_candidate else reversed(outputs)
        answers = self.comparison.compare(baseline, candidate)
        scores = self.comparison.scores(candidate) if of_candidate else ()
        return ComparedCopy(answers, scores, baseline, candidate)

    def compared(self, copy: ShadowCopy, comparison: ComparedCopy) -> None:
        """Count the comparison of a copy."""
        (answers, scores, *outputs), counts = comparison, copy.stage.counts
        counts.compared += 1
        counts.invalid += answers.invalid
        # One row of a batch, drawn at random, stands for all of them.
        counts.disagreed += random.random() < answers.disagreement
        count_keys(counts.class_pairs, answers.class_pair)
        count_keys(counts.score_pairs, answers.score_pair)
        count_keys(counts.candidate.scores, scores)
        if answers.disagreement:
            self._keep(copy, *outputs)

    def ended(self, copy: ShadowCopy, outcome: UncomparedCopy) -> None:
        """Count a copy without an answer."""
        if outcome.dropped:
            copy.stage.counts.dropped += 1
        elif copy.side == self.plan.candidate:
            copy.stage.counts.failed += 1
            self._keep(copy, copy.answer, None)

    def _keep(self, copy: ShadowCopy, baseline: Any, candidate: Any) -> None:
        if len(self.examples) < self.plan.keep_inputs:
            kept = examples.example(copy.request, copy.stage.number, baseline, candidate)
            self.examples.append(kept)
