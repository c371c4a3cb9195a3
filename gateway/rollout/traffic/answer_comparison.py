"""Comparison of the answers of both sides to the same request.

Values are compared within a tolerance if both sides compute the same checkpoint, decisions if the
candidate was trained again: the side of a threshold or the largest class along the last axis, as in
the proof of an export, or the set of the largest classes. Datatypes without a tolerance (text,
integers, booleans) must be equal.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from modelport.gateway.rollout.plan import ComparisonKind, RolloutPlan
from modelport.gateway.rollout.statistics import retrained
from modelport.gateway.rollout.statistics.counts import CLASSES, SCORE_BINS
from modelport.gateway.types import Array, Datatype, Tensor

_FLOATS = (Datatype.FP16, Datatype.FP32, Datatype.FP64, Datatype.BF16)
#: Most scores of an answer that are counted.
MAX_SCORES = 256


class ComparedAnswers(NamedTuple):
    """The result of a comparison.

    Attributes:
        disagreement: share of the values' or decisions' rows that disagree; 1 for invalid answers.
        invalid: the candidate lacks an output that the baseline has, or has it with another
            datatype or shape, or with a non-finite value where the baseline's is finite.
        class_pair, score_pair: the keys of the decisions, and of the scores, of both sides in one
            row, for the tables of ``StageCounts``; empty without such.
    """

    disagreement: float
    invalid: bool = False
    class_pair: tuple[int, ...] = ()
    score_pair: tuple[int, ...] = ()


_INVALID = ComparedAnswers(1.0, invalid=True)


class AnswerComparison:
    """The comparison that a plan asks for."""

    def __init__(self, plan: RolloutPlan) -> None:
        #: Whether decisions are compared.
        self.decides = plan.comparison is ComparisonKind.DECISIONS
        self._output, self._threshold = plan.decision_output, plan.decision_threshold
        self._top_k = plan.decision_top_k
        self._atol, self._rtol = plan.limits.atol, plan.limits.rtol

    def compare(self, baseline: Sequence[Tensor], candidate: Sequence[Tensor]) -> ComparedAnswers:
        """Compare the outputs of both sides."""
        theirs = {tensor.name: tensor for tensor in candidate}
        if len(theirs) != len(baseline) or any(each.name not in theirs for each in baseline):
            return _INVALID
        worst = 0.0
        for tensor in baseline:
            other = theirs[tensor.name]
            if tensor.datatype is not other.datatype or tensor.data.shape != other.data.shape:
                return _INVALID
            expected, actual = numbers(tensor), numbers(other)
            if tensor.datatype in _FLOATS:
                if not self.decides and self._within(expected, actual).all():
                    continue  # true for most answers
                if np.any(np.isfinite(expected) & ~np.isfinite(actual)):
                    return _INVALID
            worst = max(worst, self._disagreement(tensor, expected, actual))
        if not self.decides:
            return ComparedAnswers(worst)
        candidate = [theirs[tensor.name] for tensor in baseline]
        return ComparedAnswers(
            worst,
            class_pair=_pair(self.decided(baseline), self.decided(candidate), CLASSES),
            score_pair=_pair(self.scores(baseline), self.scores(candidate), SCORE_BINS),
        )

    def _within(self, expected: Array, actual: Array) -> Array:
        """Whether values are finite, and their difference within the tolerance."""
        with np.errstate(invalid="ignore"):  # infinity - infinity
            within = np.abs(expected - actual) <= self._atol + self._rtol * np.abs(expected)
        return np.asarray(within & np.isfinite(expected) & np.isfinite(actual))

    def _disagreement(self, tensor: Tensor, expected: Array, actual: Array) -> float:
        is_float = tensor.datatype in _FLOATS
        if self.decides:
            decided = self._chosen(tensor.name, expected), self._chosen(tensor.name, actual)
            if decided[0] is not None and decided[1] is not None:
                differs = decided[0] != decided[1]
                return _share(np.asarray(differs.any(axis=-1) if self._top_k > 1 else differs))
            if is_float:
                return 0.0  # the output leads to no decision
        if not is_float:
            return float(not np.array_equal(expected, actual))
        same = (expected == actual) | (np.isnan(expected) & np.isnan(actual))
        return float(not np.all(self._within(expected, actual) | same))

    def _chosen(self, name: str, values: Array) -> Array | None:
        """The decisions, or the sorted indices of the ``decision_top_k`` largest classes."""
        decisions, count = self.decisions(name, values), self._top_k
        if decisions is None or count == 1:
            return decisions
        if not values.ndim or values.shape[-1] <= count:
            return None
        # Of equal values, the first are chosen, as by ``argmax``.
        backwards = np.argsort(values[..., ::-1], axis=-1, kind="stable")[..., -count:]
        return np.sort(values.shape[-1] - 1 - backwards, axis=-1)

    def decisions(self, name: str, values: Array) -> Array | None:
        """The decisions that the values of output ``name`` lead to, or None.

        They are the sides of the threshold, or the largest classes of the last axis. An output of
        integers decides only if the plan names it; one of them in a row is a class itself.
        """
        if self._output and name != self._output:
            return None
        is_float = values.dtype.kind == "f"
        if not is_float and (not self._output or values.dtype.kind not in "iub"):
            return None
        if self._threshold is not None:
            return np.asarray(values >= self._threshold)
        if not values.size or not values.ndim or values.shape[-1] < 2:
            return None if is_float else values
        return np.asarray(values.argmax(axis=-1))

    def decided(self, outputs: Sequence[Tensor]) -> Array | None:
        """The decisions of an answer: those of the first output that leads to any."""
        for tensor in outputs:
            found = self.decisions(tensor.name, numbers(tensor))
            if found is not None:
                return found.reshape(-1)
        return None

    def scores(self, outputs: Sequence[Tensor]) -> list[int]:
        """The scores behind the decisions of an answer, as bins of [0, 1]; none without decisions.

        A score is the value before the threshold, or the share of the largest class. Values that
        are not probabilities become some, by the logistic function or the softmax.
        """
        if not self.decides:
            return []
        for tensor in outputs:
            values = numbers(tensor) if tensor.datatype in _FLOATS else None
            if values is None or not values.size or self.decisions(tensor.name, values) is None:
                continue
            values = values.astype(np.float64)
            with np.errstate(all="ignore"):
                if self._threshold is None:
                    rows = values.reshape(-1, values.shape[-1])[:MAX_SCORES]
                    scores = _probabilities(rows).max(axis=-1)
                else:
                    scores = values.reshape(-1)[:MAX_SCORES]
                    if not 0 < self._threshold < 1:
                        scores = 1 / (1 + np.exp(-scores))
                bins = np.clip(scores * SCORE_BINS, 0, SCORE_BINS - 1)
            found: list[int] = bins[np.isfinite(bins)].astype(int).tolist()
            return found
        return []


def _pair(
    baseline: Sequence[int] | Array | None, candidate: Sequence[int] | Array | None, base: int
) -> tuple[int, ...]:
    """The key of a row drawn at random; empty if the sides have not the same rows."""
    if baseline is None or candidate is None or not 0 < len(baseline) == len(candidate):
        return ()
    row = random.randrange(len(baseline))
    return (retrained.pair_key(int(baseline[row]), int(candidate[row]), base),)


def numbers(tensor: Tensor) -> Array:
    """The values of ``tensor``; FP16 and BF16 as FP32."""
    if tensor.datatype is Datatype.BF16:
        return (tensor.data.astype(np.uint32) << 16).view(np.float32)
    if tensor.datatype is Datatype.FP16:
        return tensor.data.astype(np.float32)
    return tensor.data


def count_keys(into: dict[int, int], keys: Iterable[int]) -> None:
    """Add the bins of ``AnswerComparison.scores``, or the pairs of ``ComparedAnswers``."""
    for each in keys:
        into[each] = into.get(each, 0) + 1


def _share(mask: Array) -> float:
    return float(mask.mean()) if mask.size else 0.0


def _probabilities(rows: Array) -> Array:
    if rows.min() >= 0 and np.allclose(rows.sum(axis=-1), 1, atol=1e-3):
        return rows
    powers = np.exp(rows - rows.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))
