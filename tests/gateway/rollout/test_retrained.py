"""Decisions of retrained candidates: a real one passes, and harmful ones do not.

The models are trained here, on halves of scikit-learn's digits and of its tumours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from modelport.gateway.rollout.plan import ComparisonKind, RolloutLimits
from modelport.gateway.rollout.statistics.counts import SideCounts, StageCounts
from modelport.gateway.rollout.statistics.decision import RolloutDecision, RolloutVerdict, decide
from modelport.gateway.rollout.statistics.evidence import CriterionStatus
from modelport.gateway.rollout.traffic.answer_comparison import AnswerComparison, count_keys
from modelport.gateway.types import Datatype, Tensor
from tests.gateway.rollout import plans

Scores = npt.NDArray[np.float64]
Change = Callable[[Scores], Scores]

DIGITS = plans.plan(
    shadow=0.1,
    comparison=ComparisonKind.DECISIONS,
    limits=RolloutLimits(max_disagreement=None),
)
TUMOURS = plans.plan(
    shadow=0.1,
    comparison=ComparisonKind.DECISIONS,
    limits=RolloutLimits(max_disagreement=None),
    decision_threshold=0.5,
)
PAIRS = 600


@cache
def answers(threshold: bool) -> tuple[Scores, Scores]:
    """Held-out answers of a model, and of one that was trained on other rows."""
    inputs, labels = (load_breast_cancer if threshold else load_digits)(return_X_y=True)
    inputs = StandardScaler().fit_transform(inputs)
    order = np.random.default_rng(0).permutation(len(labels))
    third = len(order) // 3
    found = []
    for rows in (order[:third], order[third : 2 * third]):
        model = LogisticRegression(C=0.1, max_iter=200).fit(inputs[rows], labels[rows])
        found.append(model.predict_proba(inputs[order[2 * third :]]))
    return (found[0][:, 1:], found[1][:, 1:]) if threshold else (found[0], found[1])


def decision(threshold: bool, change: Change) -> RolloutDecision:
    """The decision after ``PAIRS`` pairs of a model's answers and the changed retrained one's."""
    plan = TUMOURS if threshold else DIGITS
    baseline, retrained = answers(threshold)
    candidate, counts = change(retrained), StageCounts(SideCounts(10 * PAIRS))
    comparison = AnswerComparison(plan)
    for row in np.random.default_rng(0).integers(len(baseline), size=PAIRS):
        sides = (np.float32(side[row : row + 1]) for side in (baseline, candidate))
        found = comparison.compare(*([Tensor("y", Datatype.FP32, side)] for side in sides))
        counts.compared += 1
        counts.disagreed += found.disagreement > 0
        count_keys(counts.class_pairs, found.class_pair)
        count_keys(counts.score_pairs, found.score_pair)
    return decide(plan, 0, [counts], 60)


@pytest.mark.parametrize("threshold", [False, True], ids=["digits", "tumours"])
def test_a_model_that_was_trained_again_passes(threshold: bool) -> None:
    baseline, retrained = answers(threshold)
    assert np.abs(baseline - retrained).max() > 0.2
    found = decision(threshold, lambda scores: scores)
    assert found.verdict is RolloutVerdict.ADVANCE
    events = {each.name: each.events for each in found.criteria}
    assert events["class_changes"] > 0


def to_class_3(scores: Scores) -> Scores:
    found = scores / 2
    found[:, 3] += 0.5
    return found


@pytest.mark.parametrize(
    ("threshold", "change", "broken"),
    [
        (False, lambda scores: np.roll(scores, 1, axis=1), "class_changes"),
        (False, to_class_3, "class_shares"),
        (False, lambda s: s**0.3 / (s**0.3).sum(axis=1, keepdims=True), "scores"),
        (True, lambda scores: 1 - scores, "class_changes"),
        (True, lambda scores: 0.4 * scores, "class_changes"),
        (True, lambda scores: np.minimum(scores + 0.2, 1), "scores"),
        (True, lambda s: np.where(np.arange(len(s))[:, None] % 3 == 0, 0.99, s), "class_shares"),
    ],
    ids=[
        "other classes", "one class", "shifted scores of classes", "the opposite", "never",
        "shifted scores", "a class that grows",
    ],
)  # fmt: skip
def test_a_harmful_candidate_is_rolled_back_although_any_share_may_differ(
    threshold: bool, change: Change, broken: str
) -> None:
    found = decision(threshold, change)
    assert found.verdict is RolloutVerdict.ROLLBACK
    assert broken in [e.name for e in found.criteria if e.status is CriterionStatus.BROKEN]


def test_150_different_decisions_of_162_are_found_in_them() -> None:
    """Half of each class's: the shares of the classes are the same."""
    counts = StageCounts(compared=162, disagreed=150, class_pairs={0: 6, 1: 75, 16: 75, 17: 6})
    found = decide(DIGITS, 0, [counts], 1)
    assert found.verdict is RolloutVerdict.ROLLBACK
    assert found.reason.startswith("class_changes: too many of its decisions of a class are others")


def test_these_limits_can_be_switched_off_and_values_have_none() -> None:
    off = dict.fromkeys(("max_class_changes", "max_class_shift", "max_score_shift"))
    counts = StageCounts(compared=162, class_pairs={1: 81, 16: 81}, score_pairs={5: 162})
    for plan in (
        plans.plan(shadow=0.1, comparison=ComparisonKind.DECISIONS, limits=RolloutLimits(**off)),
        plans.plan(shadow=0.1),
    ):
        assert decide(plan, 0, [counts], 1).verdict is RolloutVerdict.HOLD
