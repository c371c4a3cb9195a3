"""Labels that come later: matched by request id, attributed, and counted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelport.gateway.errors import InvalidArgument, NotFound
from modelport.gateway.rollout.plan import ComparisonKind
from modelport.gateway.rollout.process_group import ProcessGroup
from modelport.gateway.rollout.statistics.counts import Attribution
from modelport.gateway.rollout.traffic import feedback
from modelport.gateway.rollout.traffic.participant import RolloutParticipant
from tests.gateway.rollout.sides import Sides, sides, times

DECISIONS: dict[str, Any] = {"comparison": ComparisonKind.DECISIONS, "decision_threshold": 2.5}


async def doubled_and_tripled(folder: Path, share: float, **plan: Any) -> Sides:
    """Version 1 decides 2 x 1 < 2.5 and 2 x 2 > 2.5, version 2 decides 3 x 1 > 2.5."""
    found = await sides(folder, times(3))
    found.apply(share, **(plan or DECISIONS))
    return found


async def test_wrong_decisions_are_attributed_to_the_side_that_made_them(tmp_path: Path) -> None:
    found = await doubled_and_tripled(tmp_path, 0.0)
    for request_id in ("a", "b", "c"):
        await found.ask(id=request_id)
    found.apply(1.0)
    await found.ask(id="d")
    right, wrong = [False, True], [True, False]
    rows = [
        {"id": i, "label": label}
        for i, label in zip("abcd", [right, right, wrong, right], strict=True)
    ]
    assert found.rollouts.feedback("m", rows) == {"counted": 4, "unknown": [], "repeated": []}
    assert found.counts().wrong == {
        "accuracy": Attribution(1, 2),
        "precision": Attribution(1, 2),
        "recall": Attribution(0, 1),
    }


async def test_a_label_counts_in_the_stage_of_its_request(tmp_path: Path) -> None:
    found = await doubled_and_tripled(tmp_path, 1.0)
    await found.ask(id="a")
    found.apply(1.0, stage=1)
    found.rollouts.feedback("m", [{"id": "a", "label": [0, 0]}])
    assert found.counts(0).wrong["accuracy"] == Attribution(1, 1)
    assert found.counts(1).wrong == {}


async def test_unknown_and_repeated_requests_are_told_and_not_counted(tmp_path: Path) -> None:
    found = await doubled_and_tripled(tmp_path, 1.0)
    await found.ask(id="a")
    rows = [{"id": "z", "label": 1}, {"id": "a", "label": [0, 0]}, {"id": "a", "label": [0, 0]}]
    answer = found.rollouts.feedback("m", rows)
    assert answer == {"counted": 1, "unknown": [0], "repeated": [2]}
    assert found.counts().wrong["accuracy"] == Attribution(1, 1)


async def test_rows_can_say_themselves_what_was_predicted(tmp_path: Path) -> None:
    found = await doubled_and_tripled(tmp_path, 0.5)
    rows: list[dict[str, Any]] = [
        {"id": "a", "label": 0, "prediction": 2.6, "model_version": "2"},
        {"id": "b", "label": 0, "prediction": 2.4, "model_version": 1},
        {"id": "c", "label": 1, "prediction": False, "model_version": "1", "stage": 0},
        {"id": "d", "label": 1},
    ]
    feedback = found.rollouts.feedback
    assert feedback("m", rows) == {"counted": 0, "unknown": [0, 1, 2, 3], "repeated": []}
    answer = feedback("m", rows, complete=True)
    assert answer == {"counted": 3, "unknown": [3], "repeated": []}
    answer = feedback("m", rows, complete=True)
    assert answer == {"counted": 0, "unknown": [3], "repeated": [0, 1, 2]}
    assert found.counts().wrong["accuracy"] == Attribution(1, 2)


class TwoWorkers:
    """The processes of a gateway, each with its own requests."""

    def __init__(self, *workers: RolloutParticipant) -> None:
        self._workers = workers

    async def ask_patiently(self, operation: str, arguments: dict[str, Any]) -> list[Any]:
        return [await each.handlers[operation](arguments) for each in self._workers]


async def test_each_label_counts_once_whichever_process_answered(tmp_path: Path) -> None:
    found = [await doubled_and_tripled(tmp_path / name, 1.0) for name in "ab"]
    workers = [RolloutParticipant(each.manager, each.rollouts) for each in found]
    group = ProcessGroup(TwoWorkers(*workers), [])  # type: ignore[arg-type]
    await found[0].ask(id="a")
    await found[1].ask(id="b")
    said = {"label": [0, 0], "prediction": [1, 1], "model_version": "2"}
    rows = [{"id": name, **said} for name in "abc"] + [{"id": "d", "label": [0, 0]}]

    def wrong() -> int:
        counts = [each.counts().wrong.get("accuracy", Attribution()) for each in found]
        return sum(each.total for each in counts)

    assert await group.feedback("m", rows) == {"counted": 3, "unknown": [3], "repeated": []}
    assert wrong() == 3
    again = {"counted": 0, "unknown": [3], "repeated": [0, 1, 2]}
    assert await group.feedback("m", rows) == again
    assert wrong() == 3
    # Known to be bad: every process counts the rows that say what was predicted.
    rows = [{"id": "e", **said}]
    for worker in workers:
        await worker.feedback({"model": "m", "rows": rows, "process": worker.id})
    assert wrong() == 5


async def test_the_trace_of_a_request_without_an_id_identifies_it(tmp_path: Path) -> None:
    found = await doubled_and_tripled(tmp_path, 1.0)
    await found.ask(trace="from x-request-id")
    rows = [{"id": "from x-request-id", "label": [1, 1]}]
    assert found.rollouts.feedback("m", rows)["counted"] == 1
    assert found.counts().wrong == {}


async def test_the_largest_class_has_an_accuracy_alone(tmp_path: Path) -> None:
    found = await doubled_and_tripled(tmp_path, 1.0, comparison=ComparisonKind.DECISIONS)
    await found.ask(1, 2, id="a")
    found.rollouts.feedback("m", [{"id": "a", "label": 0}])
    assert found.counts().wrong == {"accuracy": Attribution(1, 1)}


async def test_the_oldest_requests_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback, "MAX_REQUESTS", 2)
    found = await doubled_and_tripled(tmp_path, 1.0)
    for request_id in "abc":
        await found.ask(id=request_id)
    rows = [{"id": request_id, "label": [1, 1]} for request_id in "abc"]
    assert found.rollouts.feedback("m", rows)["unknown"] == [0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"id": "a"}, "list of rows"),
        ([7], "needs an 'id'"),
        ([{"id": 7, "label": 1}], "needs an 'id'"),
        ([{"id": "a"}], "'label' must be"),
        ([{"id": "a", "label": "fraud"}], "'label' must be"),
        ([{"id": "a", "label": 0.3}], "'label' must be"),
        ([{"id": "a", "label": {"b": 1}}], "'label' must be"),
        ([{"id": "a", "label": 1, "weight": 2}], "unknown member 'weight'"),
        ([{"id": "a", "label": [1]}], "has 1 labels for 2 decisions"),
    ],
)
async def test_a_malformed_row_is_named(tmp_path: Path, rows: Any, message: str) -> None:
    found = await doubled_and_tripled(tmp_path, 1.0)
    await found.ask(id="a")
    with pytest.raises(InvalidArgument, match=message):
        found.rollouts.feedback("m", rows)
    assert found.counts().wrong == {}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prediction": 1, "model_version": "7"}, "'model_version' must be '1' or '2'"),
        ({"prediction": 1}, "'model_version' must be '1' or '2'"),
        ({"prediction": 1, "model_version": "1", "stage": 99}, "no stage 99 has begun"),
        ({"prediction": "x", "model_version": "1"}, "'prediction' must be"),
    ],
)
async def test_a_malformed_complete_row_is_named(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    found = await doubled_and_tripled(tmp_path, 1.0)
    with pytest.raises(InvalidArgument, match=message):
        found.rollouts.feedback("m", [{"id": "a", "label": 1, **row}], complete=True)


async def test_feedback_for_a_model_without_a_rollout_is_refused(tmp_path: Path) -> None:
    found = await sides(tmp_path, times(3))
    with pytest.raises(NotFound, match="no rollout of model 'm'"):
        found.rollouts.feedback("m", [])
