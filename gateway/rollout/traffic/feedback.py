"""Labels that come later, by request id: wrong decisions of both sides.

Every process remembers the decisions of its last requests that have an id (``id`` of the Open
Inference Protocol, else ``x-request-id``). A row for an older request, or one that another process
answered before it ended, can be *complete*: it says itself what was predicted, and by which side.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.rollout.plan import RolloutPlan, RolloutSide
from modelport.gateway.rollout.traffic.request_events import AssignedRequest
from modelport.gateway.rollout.traffic.sides import StageTraffic
from modelport.gateway.types import Array

#: Most requests that are remembered, labels that are known to be counted, and decisions of each.
MAX_REQUESTS, MAX_LABELLED, MAX_DECISIONS = 50_000, 100_000, 256
_FIELDS = frozenset({"id", "label", "prediction", "model_version", "stage", "route_key"})


class AnsweredRequest(NamedTuple):
    """A request that was answered, with the decisions of the answer."""

    assigned: AssignedRequest
    decisions: tuple[int, ...]


class JudgedRequest(NamedTuple):
    """A request, and the criteria by which its answer is wrong: "accuracy", "precision", ..."""

    assigned: AssignedRequest
    criteria: tuple[str, ...]


#: Returns the traffic of a stage that has begun, or of the current one.
FindStage = Callable[[int | None], StageTraffic | None]


class LabelledRequests:
    """The requests of one rollout that wait for their labels, in this process."""

    def __init__(self, plan: RolloutPlan) -> None:
        self._plan = plan
        self._answers: OrderedDict[str, AnsweredRequest] = OrderedDict()
        #: Ids of complete rows, so that a label that is sent twice counts once.
        self._labelled: OrderedDict[str, None] = OrderedDict()

    def remember(self, request_id: str, assigned: AssignedRequest, decisions: Array | None) -> None:
        """Note the decisions of a request, if there are any; the oldest requests are forgotten."""
        if decisions is not None and 0 < decisions.size <= MAX_DECISIONS:
            found = tuple(int(each) for each in decisions.tolist())
            self._answers[request_id] = AnsweredRequest(assigned, found)
            if len(self._answers) > MAX_REQUESTS:
                self._answers.popitem(last=False)

    def has_label(self, request_id: str) -> bool:
        """Whether a label of the request was judged before."""
        return request_id in self._labelled

    def judge(
        self, row: Mapping[str, Any], find: FindStage, complete: bool
    ) -> JudgedRequest | None:
        """Compare the row's label with the decision; None if its request is unknown.

        Args:
            find: finds the stage that a complete row names.
            complete: judge only rows that say themselves what was predicted.

        Raises:
            InvalidArgument: the row is malformed.
        """
        request_id, labels = row["id"], _decisions(row, "label")
        if not complete:
            answer = self._answers.get(request_id)
        elif request_id in self._labelled or "prediction" not in row:
            answer = None
        else:
            answer = self._stated(row, find)
        if answer is None:
            return None
        if len(labels) != len(answer.decisions):
            raise InvalidArgument(
                f"row '{request_id[:64]}' has {len(labels)} labels for {len(answer.decisions)} "
                "decisions"
            )
        self._answers.pop(request_id, None)
        self._labelled[request_id] = None
        if len(self._labelled) > MAX_LABELLED:
            self._labelled.popitem(last=False)
        pairs = tuple(zip(answer.decisions, labels, strict=True))
        wrong = {
            "accuracy": any(decision != label for decision, label in pairs),
            "precision": any(decision and not label for decision, label in pairs),
            "recall": any(label and not decision for decision, label in pairs),
        }
        binary = self._plan.decision_threshold is not None
        names = tuple(wrong) if binary else ("accuracy",)
        return JudgedRequest(answer.assigned, tuple(name for name in names if wrong[name]))

    def _stated(self, row: Mapping[str, Any], find: FindStage) -> AnsweredRequest:
        said, plan = str(row.get("model_version", "")), self._plan
        sides = {_name(plan, plan.baseline): False, _name(plan, plan.candidate): True}
        if said not in sides:
            known = " or ".join(f"'{name}'" for name in sides)
            raise InvalidArgument(
                f"row '{row['id'][:64]}': 'model_version' must be {known}, the one that answered"
            )
        number = row.get("stage")
        stage = find(number) if number is None or type(number) is int else None
        if stage is None:
            raise InvalidArgument(f"row '{row['id'][:64]}': no stage {str(number)[:64]} has begun")
        key = str(row.get("route_key", "")).encode("utf-8", "surrogatepass")
        decisions = _decisions(row, "prediction", plan.decision_threshold)
        return AnsweredRequest(AssignedRequest(stage, sides[said], key), decisions)


def check(rows: Any) -> Sequence[Mapping[str, Any]]:
    """Check rows of labels that come from outside.

    Raises:
        InvalidArgument: they are not a list of objects with ``id`` and ``label``.
    """
    if type(rows) is not list:
        raise InvalidArgument("feedback must be a list of rows, each with 'id' and 'label'")
    for row in rows:
        if type(row) is not dict or type(row.get("id")) is not str or not row["id"]:
            raise InvalidArgument("every row of feedback needs an 'id', the id of a request")
        if unknown := sorted(row.keys() - _FIELDS):
            raise InvalidArgument(
                f"row '{row['id'][:64]}' has an unknown member '{unknown[0][:64]}'; known are "
                f"{', '.join(sorted(_FIELDS))}"
            )
        _decisions(row, "label")
    return rows


def _name(plan: RolloutPlan, side: RolloutSide) -> str:
    return str(side.version) if side.model == plan.model else f"{side.model}/{side.version}"


def _decisions(
    row: Mapping[str, Any], member: str, threshold: float | None = None
) -> tuple[int, ...]:
    """The decisions in a member: a class, a truth value, or a score if there is a threshold."""
    value: Any = row.get(member)
    values: list[Any] = value if type(value) is list else [value]
    found = []
    for each in values:
        if type(each) is float and threshold is not None:
            found.append(int(each >= threshold))
        elif type(each) in (bool, int) or (type(each) is float and each.is_integer()):
            found.append(int(each))
        else:
            raise InvalidArgument(
                f"row '{row['id'][:64]}': '{member}' must be a class or true or false, or a list "
                "of such"
            )
    return tuple(found)
