"""The state of a rollout, as all gateways of a repository share it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

import orjson

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.rollout.plan import RolloutPlan, StageKind, public_url
from modelport.gateway.rollout.statistics.counts import StageCounts
from modelport.gateway.rollout.statistics.evidence import CriterionFigures
from modelport.gateway.runtime import checked_json
from modelport.gateway.runtime.checked_json import STRICT

MAX_REVISION = 10**10 - 1
MAX_STATE_BYTES = 4 * 1024 * 1024
#: Most events of a rollout that are kept; the first one always is.
MAX_EVENTS = 1000
MAX_REASON = 1000
#: The end of the year 9999; tools for people know no later time.
MAX_TIME = 253_402_300_799.0
REPLICA = re.compile(r"[0-9a-f]{32}\Z")


class RolloutPhase(StrEnum):
    """The phases of a rollout; the last two end it."""

    RUNNING = "running"
    #: The stage's share stays. Nothing but a rollback happens without a person.
    PAUSED = "paused"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled back"

    @property
    def ended(self) -> bool:
        return self in (RolloutPhase.PROMOTED, RolloutPhase.ROLLED_BACK)


class RolloutEventKind(StrEnum):
    """The kinds of events in the life of a rollout."""

    STARTED = "started"
    ADVANCED = "advanced"
    PAUSED = "paused"
    RESUMED = "resumed"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled back"


@dataclass(frozen=True, slots=True)
class RolloutEvent:
    """A change of a rollout. ``stage``: after it; ``by``: empty if it is automatic."""

    __pydantic_config__: ClassVar = STRICT

    #: Seconds since 1970.
    time: float
    kind: RolloutEventKind
    stage: int
    reason: str = ""
    by: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.time <= MAX_TIME:
            raise InvalidArgument("the time of an event is out of range")


@dataclass(frozen=True, slots=True)
class RecordedCriterion(CriterionFigures):
    """The evidence about a criterion at the end, as ``CriterionEvidence.to_json`` has it."""

    __pydantic_config__: ClassVar = STRICT

    estimate: float | None
    lower: float | None
    upper: float | None

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise InvalidArgument("alpha must be between 0 and 1")


@dataclass(frozen=True, slots=True)
class RolloutState:
    """One revision of the state of a model's latest rollout.

    Raises:
        InvalidArgument: its parts contradict each other.
    """

    __pydantic_config__: ClassVar = STRICT

    revision: int
    plan: RolloutPlan
    #: The replica that decides, and wrote this revision; empty: any other may take over at once.
    leader: str
    phase: RolloutPhase = RolloutPhase.RUNNING
    #: The index in ``plan.stages``.
    stage: int = 0
    #: Seconds in the stage, without pauses and without the time in which no gateway ran.
    seconds: float = 0.0
    #: Whether the outcome needs nothing more: the repository's configuration is that of the side
    #: that won, or cannot be, for the reason in ``unsettled_reason``.
    settled: bool = False
    unsettled_reason: str = ""
    #: Identifies the plan as one that a gateway has started; empty: it has no webhooks.
    seal: str = ""
    #: The reason why the next stage does not begin although it may, such as a webhook's refusal.
    hold_reason: str = ""
    events: tuple[RolloutEvent, ...] = ()
    #: The criteria at the end, and the counts of each stage, for people.
    evidence: tuple[RecordedCriterion, ...] = ()
    counts: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.revision <= MAX_REVISION:
            raise InvalidArgument("the revision is out of range")
        for stage in (self.stage, *(event.stage for event in self.events)):
            if not 0 <= stage < len(self.plan.stages):
                raise InvalidArgument(f"the plan has no stage {stage}")
        for counts in self.counts:
            StageCounts.from_json(counts)
        if self.seconds < 0:
            raise InvalidArgument("seconds must not be negative")
        if self.leader and not REPLICA.match(self.leader):
            raise InvalidArgument("the leader is not the identifier of a replica")
        if self.settled and not self.phase.ended:
            raise InvalidArgument("a rollout that has not ended cannot be settled")

    @property
    def needs_leader(self) -> bool:
        """Whether anything is left to decide or to do."""
        return not (self.phase.ended and self.settled)

    @property
    def undoable(self) -> bool:
        """Whether the candidate was promoted, but not in the repository's configuration.

        Then the rollout continues splitting the traffic, until a person rolls it back.
        """
        return self.phase is RolloutPhase.PROMOTED and self.settled and bool(self.unsettled_reason)

    @property
    def stages(self) -> list[dict[str, Any]]:
        """The stages that began, with their times."""
        found: list[dict[str, Any]] = []
        for event in self.events:
            starts = event.kind in (RolloutEventKind.STARTED, RolloutEventKind.ADVANCED)
            if found and (starts or event.kind in _ENDS):
                found[-1].setdefault("ended", event.time)
            if starts:
                stage = self.plan.stages[event.stage]
                found.append({**stage._asdict(), "began": event.time})
        return found

    def to_json(self) -> dict[str, Any]:
        """The state as JSON values for people, who see no secret of a webhook's URL."""
        document: dict[str, Any] = orjson.loads(checked_json.write(self))
        document["plan"]["webhooks"] = [public_url(url) for url in self.plan.webhooks]
        del document["seal"]
        return document | {"stages": self.stages}


_ENDS = (RolloutEventKind.PROMOTED, RolloutEventKind.ROLLED_BACK)


def read_state(content: bytes, model: str, revision: int) -> RolloutState:
    """The state in a file of the repository, which anyone may have written.

    Raises:
        InvalidArgument: it is not a state, or that of another model or revision.
    """
    state = checked_json.read(RolloutState, content)
    if state.plan.model != model:
        raise InvalidArgument(f"it is the state of another model, '{state.plan.model}'")
    if state.revision != revision:
        raise InvalidArgument(f"it is revision {state.revision}")
    return state


class RolloutRouting(NamedTuple):
    """The traffic that a rollout sends to its candidate, in all processes of a gateway."""

    plan: RolloutPlan
    #: The index in ``plan.stages``, for the counts.
    stage: int
    kind: StageKind
    #: 0: nothing goes to the candidate.
    share: float
    revision: int
    #: The time of ``time.monotonic`` from which nothing goes to the candidate, if no process
    #: hears of a later time until then; infinite once the candidate is promoted.
    until: float = math.inf

    @property
    def candidate_answers(self) -> bool:
        """Whether the candidate answers requests of clients."""
        return self.kind is StageKind.CANARY and self.share > 0

    def to_json(self) -> dict[str, Any]:
        """The routing as JSON values, for other processes of this machine."""
        until = None if math.isinf(self.until) else self.until
        plan = {"model": self.plan.model, "plan": self.plan.to_json()}
        return {**self._asdict(), **plan, "until": until}

    def same(self, other: RolloutRouting | None) -> bool:
        """Whether ``other`` sends the same requests to the same candidate."""
        for_good = math.isinf(self.until)
        return other is not None and self[:4] == other[:4] and for_good == math.isinf(other.until)


def routing_of(
    state: RolloutState, *, stopped: bool, doubtful: bool, until: float
) -> RolloutRouting | None:
    """The routing in ``state``; None: the rollout is over, and no traffic is split.

    Args:
        stopped: whether this gateway has decided on a rollback, which is not recorded yet.
        doubtful: whether there may be a newer state. A promotion cannot be taken back by itself.
        until: the time from which the state is doubtful.
    """
    plan, stage = state.plan, state.plan.stages[state.stage]
    if state.settled and not state.undoable:
        return None
    if state.phase is RolloutPhase.PROMOTED:
        share = 0.0 if stopped else 1.0
        return RolloutRouting(plan, state.stage, StageKind.CANARY, share, state.revision)
    share = 0.0 if stopped or doubtful or state.phase.ended else stage.share
    return RolloutRouting(plan, state.stage, stage.kind, share, state.revision, until)
