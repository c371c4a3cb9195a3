"""Agreement and disagreement of two answers, by values and by decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from modelport.gateway.rollout.plan import ComparisonKind, RolloutLimits
from modelport.gateway.rollout.traffic.answer_comparison import AnswerComparison, ComparedAnswers
from modelport.gateway.types import NUMPY_DTYPES, Datatype, Tensor
from tests.gateway.rollout.sides import PLAN

INVALID = ComparedAnswers(1.0, invalid=True)
AGREEMENT, DISAGREEMENT = ComparedAnswers(0.0), ComparedAnswers(1.0)
NAN, INF = float("nan"), float("inf")


def tensor(values: Any, datatype: Datatype = Datatype.FP32, name: str = "y") -> Tensor:
    return Tensor(name, datatype, np.array(values, NUMPY_DTYPES[datatype]))


def by_values(atol: float = 0.0, rtol: float = 0.0) -> AnswerComparison:
    return AnswerComparison(replace(PLAN, limits=RolloutLimits(atol=atol, rtol=rtol)))


def by_decisions(
    threshold: float | None = None, output: str = "", top_k: int = 1
) -> AnswerComparison:
    return AnswerComparison(
        replace(
            PLAN,
            comparison=ComparisonKind.DECISIONS,
            decision_threshold=threshold,
            decision_output=output,
            decision_top_k=top_k,
        )
    )


def compared(
    comparison: AnswerComparison, baseline: Sequence[Tensor], candidate: Sequence[Tensor]
) -> ComparedAnswers:
    """The comparison without the row that stands for all."""
    found = comparison.compare(baseline, candidate)
    return found._replace(class_pair=(), score_pair=())


@pytest.mark.parametrize(
    ("expected", "actual", "result"),
    [
        ([1.0, 2.0], [1.0, 2.0], AGREEMENT),
        ([100.0], [100.9], AGREEMENT),
        ([100.0], [101.2], DISAGREEMENT),
        ([0.0], [0.09], AGREEMENT),
        ([0.0], [0.11], DISAGREEMENT),
        ([NAN, 1.0], [NAN, 1.0], AGREEMENT),
        ([INF, -INF], [INF, -INF], AGREEMENT),
        ([INF], [-INF], DISAGREEMENT),
        ([NAN], [1.0], DISAGREEMENT),
        ([INF], [1.0], DISAGREEMENT),
        ([1.0], [NAN], INVALID),
        ([1.0], [INF], INVALID),
        ([[1.0]], [1.0], INVALID),
        ([1.0, 2.0], [1.0], INVALID),
        ([], [], AGREEMENT),
    ],
)
@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.FP64, Datatype.FP16])
def test_values_agree_within_the_tolerance(
    expected: Any, actual: Any, result: ComparedAnswers, datatype: Datatype
) -> None:
    comparison = by_values(atol=0.1, rtol=0.01)
    assert compared(comparison, [tensor(expected, datatype)], [tensor(actual, datatype)]) == result


def test_bfloat16_is_compared_as_numbers_and_not_as_bits() -> None:
    one, near, far = (tensor([bits], Datatype.BF16) for bits in (0x3F80, 0x3F81, 0x4000))
    assert compared(by_values(atol=0.01), [one], [near]) == AGREEMENT
    assert compared(by_values(atol=0.01), [one], [far]) == DISAGREEMENT
    assert compared(by_values(), [one], [tensor([0x7FC0], Datatype.BF16)]) == INVALID


@pytest.mark.parametrize("kind", [by_values(rtol=0.5), by_decisions()])
@pytest.mark.parametrize(
    ("datatype", "expected", "actual"),
    [
        (Datatype.INT64, [1000], [1001]),
        (Datatype.UINT8, [0], [255]),
        (Datatype.BOOL, [True], [False]),
        (Datatype.BYTES, [b"cat"], [b"dog"]),
    ],
)
def test_what_has_no_tolerance_must_be_equal(
    kind: AnswerComparison, datatype: Datatype, expected: Any, actual: Any
) -> None:
    same, other = tensor(expected, datatype), tensor(actual, datatype)
    assert compared(kind, [same], [tensor(expected, datatype)]) == AGREEMENT
    assert compared(kind, [same], [other]) == DISAGREEMENT


@pytest.mark.parametrize("kind", [by_values(1e9), by_decisions()])
def test_names_datatypes_and_missing_outputs_are_invalid(kind: AnswerComparison) -> None:
    y, z = tensor([[1.0, 2.0]]), tensor([[1.0, 2.0]], name="z")
    assert compared(kind, [y, z], [z, y]) == AGREEMENT  # in any order
    for wrong in ([], [z], [y, z], [tensor([[1.0, 2.0]], Datatype.FP64)]):
        assert compared(kind, [y], wrong) == INVALID
    assert compared(kind, [y, z], [y]) == INVALID


def test_decisions_agree_although_values_differ() -> None:
    largest = by_decisions()
    assert compared(largest, [tensor([[1.0, 5.0]])], [tensor([[-3.0, 0.0]])]) == AGREEMENT
    assert compared(largest, [tensor([[1.0, 5.0]])], [tensor([[5.0, 1.0]])]) == DISAGREEMENT
    above = by_decisions(threshold=0.5)
    assert compared(above, [tensor([[0.51]])], [tensor([[0.99]])]) == AGREEMENT
    assert compared(above, [tensor([[0.51]])], [tensor([[0.49]])]) == DISAGREEMENT
    assert compared(above, [tensor([[0.5]])], [tensor([[0.5]])]) == AGREEMENT


def test_the_largest_classes_are_a_set() -> None:
    comparison, before = by_decisions(top_k=2), [[0.1, 0.5, 0.3, 0.1], [0.4, 0.3, 0.2, 0.1]]
    same = [[0.0, 0.4, 0.5, 0.1], [0.9, 0.8, 0.1, 0.0]]
    other = [[0.0, 0.4, 0.5, 0.1], [0.4, 0.1, 0.3, 0.2]]
    assert compared(comparison, [tensor(before)], [tensor(same)]) == AGREEMENT
    assert compared(comparison, [tensor(before)], [tensor(other)]) == ComparedAnswers(0.5)
    # Known to be bad: the largest class alone sees another difference.
    assert compared(by_decisions(), [tensor(before)], [tensor(same)]) == ComparedAnswers(0.5)
    ties = [[0.25, 0.25, 0.25, 0.25]]
    assert compared(comparison, [tensor(ties)], [tensor([[1.0, 0.9, 0.0, 0.0]])]) == AGREEMENT


def test_one_integer_that_the_plan_names_is_a_class_itself() -> None:
    before, after = (tensor([[c], [2]], Datatype.INT64, "class") for c in (1, 3))
    comparison = by_decisions(output="class")
    assert compared(comparison, [before], [after]) == ComparedAnswers(0.5)
    decided = comparison.decided([after])
    assert decided is not None
    assert decided.tolist() == [3, 2]
    text = tensor([[b"a"]], Datatype.BYTES, "class"), tensor([[b"b"]], Datatype.BYTES, "class")
    assert compared(comparison, [text[0]], [text[1]]) == DISAGREEMENT
    assert comparison.decided([text[0]]) is None


def test_a_batch_disagrees_by_the_share_of_its_rows() -> None:
    expected = tensor([[0.9], [0.9], [0.1], [0.1]])
    actual = tensor([[0.9], [0.1], [0.1], [0.1]])
    assert compared(by_decisions(threshold=0.5), [expected], [actual]) == ComparedAnswers(0.25)


def test_non_finite_values_are_invalid_even_if_the_decision_is_the_same() -> None:
    assert compared(by_decisions(), [tensor([[1.0, 5.0]])], [tensor([[1.0, INF]])]) == INVALID


def test_only_the_named_output_decides() -> None:
    comparison = by_decisions(output="y")
    y, other = tensor([[1.0, 5.0]]), tensor([[1.0, 5.0]], name="embedding")
    flipped = tensor([[5.0, 1.0]], name="embedding")
    assert compared(comparison, [y, other], [y, flipped]) == AGREEMENT
    assert compared(comparison, [y, other], [tensor([[5.0, 1.0]]), other]) == DISAGREEMENT


@pytest.mark.parametrize(
    ("comparison", "values", "bins"),
    [
        (by_decisions(threshold=0.5), [[0.0], [0.26], [1.0]], [0, 5, 19]),
        (by_decisions(threshold=0.0), [[0.0], [100.0]], [10, 19]),
        (by_decisions(), [[0.08, 0.92], [0.5, 0.5]], [18, 10]),
        (by_decisions(), [[-100.0, 100.0], [7.0, 7.0]], [19, 10]),
        (by_decisions(threshold=0.5), [[NAN], [0.5]], [10]),
    ],
)
def test_scores_are_twentieths(comparison: AnswerComparison, values: Any, bins: list[int]) -> None:
    assert comparison.scores([tensor(values)]) == bins


def test_the_same_checkpoint_has_no_scores() -> None:
    assert by_values().scores([tensor([[0.5]])]) == []
    assert by_decisions().scores([tensor([b"text"], Datatype.BYTES)]) == []


def test_a_pair_of_answers_has_the_decisions_and_scores_of_both_sides() -> None:
    before, after = tensor([[0.92]]), tensor([[0.16]])
    found = by_decisions(threshold=0.5).compare([before], [after])
    assert (found.class_pair, found.score_pair) == ((16,), (18 * 20 + 3,))
    rows = [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    other = tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    pairs = {by_decisions().compare([tensor(rows)], [other]).class_pair for _ in range(100)}
    assert pairs == {(18,), (16,)}  # one row, drawn at random
    # Whatever the order of the outputs.
    z = tensor([[1.0, 0.0, 0.0]], name="z")
    assert by_decisions().compare([z, before], [after, z]).class_pair == (0,)
    # Nothing to compare, or nothing that is comparable.
    for baseline, candidate in (([before], [after, z]), ([tensor([b"a"], Datatype.BYTES)],) * 2):
        found = by_decisions().compare(baseline, candidate)
        assert (found.class_pair, found.score_pair) == ((), ())
    found = by_values().compare([before], [after])
    assert (found.class_pair, found.score_pair) == ((), ())


@pytest.mark.parametrize("values", [[[NAN], [0.5]], [[NAN], [NAN]], np.zeros((0, 1))])
def test_rows_without_a_score_are_no_pair_of_scores(values: Any) -> None:
    answers = tensor(values), tensor(np.where(np.isnan(values), np.nan, 0.1))
    found = by_decisions(threshold=0.5).compare([answers[0]], [answers[1]])
    assert len(found.class_pair) == bool(np.size(values))
    assert len(found.score_pair) == bool(np.isfinite(values).any())
