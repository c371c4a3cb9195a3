"""Tests of plans and counts of rollouts: what is read from JSON is checked."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.rollout.plan import AssignmentKind, RolloutLimits, RolloutPlan, RolloutSide
from modelport.gateway.rollout.rollout_request import RolloutRequest
from modelport.gateway.rollout.statistics.counts import Attribution, SideCounts, StageCounts
from tests.gateway.rollout.plans import plan

COUNTS = StageCounts(
    SideCounts(90, 1, {"p99_ms": 2}, {-3: 4, 80: 86}, {19: 90}),
    SideCounts(10, 2),
    compared=5,
    disagreed=1,
    ranks={11: Attribution(1, 3)},
    class_pairs={17: 3},
    score_pairs={399: 2},
)


def test_a_plan_survives_json() -> None:
    wanted = plan(
        shadow=0.1,
        steps=(0.5,),
        assignment=AssignmentKind.PARAMETER,
        parameter="user",
        limits=RolloutLimits(max_p99_regression=None),
        webhooks=("https://ci.example/hook",),
        candidate=RolloutSide("other", 1),
    )
    assert RolloutPlan.from_json(json.loads(json.dumps(wanted.to_json()))) == wanted


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"steps": ()}, "1 to 100 steps"),
        ({"steps": (0.05, 0.01)}, "steps must increase"),
        ({"steps": (0.5, 0.5)}, "steps must increase"),
        ({"steps": (0.5, 1.01)}, "100 % at most"),
        ({"steps": tuple(n / 200 for n in range(1, 102))}, "1 to 100 steps"),
        ({"shadow": -0.1}, "shadow"),
        ({"candidate": RolloutSide("fraud", 2)}, "baseline already"),
        ({"candidate": RolloutSide("../x", 2)}, "model name"),
        ({"candidate": RolloutSide("fraud", 0)}, "not a valid version"),
        ({"min_seconds": 2.0, "max_seconds": 1.0}, "min_seconds"),
        ({"min_requests": 0}, "min_requests"),
        ({"power": 0.4}, "power"),
        ({"power": 1.0}, "power"),
        ({"pair": 1.1}, "pair"),
        ({"label": "a b"}, "label"),
        ({"assignment": AssignmentKind.PARAMETER}, "parameter"),
        ({"parameter": "user"}, "parameter"),
        ({"webhooks": ("file:///etc/passwd",)}, "http://"),
        ({"keep_inputs": -1}, "keep_inputs"),
        ({"id": "../../x"}, "32 hexadecimal"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_names_its_field(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        plan(**fields)


def test_limits_out_of_their_range_are_refused() -> None:
    for limits in ({"confidence": 1.0}, {"max_disagreement": 1.0}, {"atol": -1.0}):
        with pytest.raises(InvalidArgument, match=next(iter(limits))):
            RolloutLimits(**limits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("label", object()),
        ("model", 3),
        ("model", "other/../x"),
        ("shadow", True),
        ("shadow", "0.1"),
        ("steps", 0.1),
        ("steps", [None]),
        ("min_requests", 1.5),
        ("min_seconds", float("nan")),
        ("max_seconds", 10**30),
        ("assignment", "dice"),
        ("baseline", ["fraud"]),
        ("baseline", {"model": "fraud", "version": "2"}),
        ("limits", {"confidence": 0.9, "unknown": 1}),
        ("limits", None),
        ("from_the_future", 1),
    ],
)
def test_a_wrong_field_of_a_document_is_one_line(field: str, value: Any) -> None:
    document = {**plan().to_json(), field: value}
    with pytest.raises(InvalidArgument) as refusal:
        RolloutPlan.from_json(document)
    assert "\n" not in str(refusal.value)


def test_counts_survive_json() -> None:
    assert StageCounts.from_json(json.loads(json.dumps(COUNTS.to_json()))) == COUNTS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compared", -1),
        ("compared", 2**60),
        ("compared", True),
        ("compared", "1"),
        ("ranks", {"11": [3, 1]}),
        ("ranks", {"11": [1]}),
        ("ranks", {"p99": [1, 3]}),
        ("ranks", {"15": [1, 3]}),
        ("ranks", {"-1": [1, 3]}),
        ("ranks", []),
        ("ranks", None),
        ("class_pairs", {"256": 1}),
        ("score_pairs", {"-1": 1}),
        ("score_pairs", {"1": -1}),
        ("baseline", None),
        ("baseline", {"requests": 1}),
        ("candidate", {**COUNTS.to_json()["candidate"], "latency": {"x": 1}}),
        ("candidate", {**COUNTS.to_json()["candidate"], "latency": dict.fromkeys(range(5000), 1)}),
    ],
)
def test_malformed_counts_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match="malformed"):
        StageCounts.from_json({**COUNTS.to_json(), field: value})


def test_states_of_older_versions_are_read() -> None:
    """Their plans pair every request or none, and their slow requests have no rank."""
    before = plan()
    document = before.to_json()
    for name in ("power", "pair"):
        del document[name]
    found = RolloutPlan.from_json(document)
    assert found == dataclasses.replace(before, power=0.95, pair=0.1)
    for older, pair in ((True, 1.0), (False, 0.0)):
        assert RolloutPlan.from_json({**document, "pair": older}).pair == pair
    counts = COUNTS.to_json()
    for name in ("ranks", "class_pairs", "score_pairs"):
        del counts[name]
    with pytest.raises(InvalidArgument, match="ranks"):
        StageCounts.from_json(counts)
    found = StageCounts.from_json({**counts, "slow": {"p99": [1, 3]}})
    assert found == dataclasses.replace(COUNTS, ranks={}, class_pairs={}, score_pairs={})


def test_a_request_for_a_rollout_has_the_plans_defaults() -> None:
    ours = {each.name: each.default for each in dataclasses.fields(RolloutPlan)}
    for each in dataclasses.fields(RolloutRequest):
        if each.name in ours and each.name not in ("candidate", "baseline", "limits"):
            assert each.default == ours[each.name], each.name
