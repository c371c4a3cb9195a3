"""Agreement of candidate and baseline on the same requests, with accuracy as a limit.

A retrained model may answer differently from its predecessor. The report has the frequency of
different decisions, by label; if the true labels are known, accuracy (of an argmax) or AUC (of a
threshold) may fall by a given amount.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from modelport.loadtests import model_quality
from modelport.loadtests.load.payloads import Array, Tensors
from modelport.loadtests.model_quality import Deciding

#: Most labels in the report; those with the most rows come first.
MOST_LABELS = 20


@dataclass(frozen=True)
class LabelAgreement:
    """The rows of one label: a true one, or a decision of the baseline's."""

    label: str
    rows: int
    changed: int
    #: Rows with a right decision; None if the truth is unknown.
    baseline_right: int | None = None
    candidate_right: int | None = None


@dataclass(frozen=True)
class AnswerAgreement:
    """Differences between both sides' answers to the same requests.

    ``decisions`` is 0 if the model declares none. ``metric`` is ``accuracy`` or ``AUC``, or empty
    without labels. ``low`` and ``high`` are the interval of the candidate's loss.
    """

    requests: int
    #: Norm of the differences of all outputs over the norm of the baseline's.
    relative_error: float
    decisions: int = 0
    changed: int = 0
    by_label: tuple[LabelAgreement, ...] = ()
    metric: str = ""
    baseline: float | None = None
    candidate: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def drop(self) -> float | None:
        """The candidate's loss of the metric."""
        if self.baseline is None or self.candidate is None:
            return None
        return self.baseline - self.candidate


def compared(
    baseline: Sequence[Tensors],
    candidate: Sequence[Tensors],
    decided: Deciding | None,
    labels: Sequence[Array] | None,
    confidence: float,
) -> AnswerAgreement:
    """Compare both sides' answers to the same requests, batch dimension first.

    Raises:
        ValueError: there is not one label for each decision, or an answer lacks the output.
    """
    found = AnswerAgreement(len(baseline), _relative_error(baseline, candidate))
    if decided is None:
        return found
    before, after = (model_quality.scored(decided, side) for side in (baseline, candidate))
    known = labels is not None
    truth = before.decisions
    if labels is not None:
        truth = model_quality.truth_of(labels, truth.size)
    found = replace(
        found,
        decisions=truth.size,
        changed=int((before.decisions != after.decisions).sum()),
        by_label=_by_label(truth, before.decisions, after.decisions, known=known),
    )
    if not known:
        return found
    metric = model_quality.metric_of(decided, truth)
    low, high = model_quality.interval(metric, truth, (before, after), confidence)
    return replace(
        found,
        metric=metric,
        baseline=model_quality.measure(metric, truth, before),
        candidate=model_quality.measure(metric, truth, after),
        low=low,
        high=high,
    )


def _relative_error(baseline: Sequence[Tensors], candidate: Sequence[Tensors]) -> float:
    """The relative error over all numeric outputs of equal shape."""
    error = norm = 0.0
    for one, other in zip(baseline, candidate, strict=True):
        for name, wanted in one.items():
            found = other.get(name)
            if found is None or wanted.dtype.kind not in "fiub" or found.size != wanted.size:
                continue
            right, got = (np.asarray(a, np.float64).ravel() for a in (wanted, found))
            error += float(((got - right) ** 2).sum())
            norm += float((right**2).sum())
    return float(np.sqrt(error / norm)) if norm else 0.0


def _by_label(
    labels: Array, before: Array, after: Array, *, known: bool
) -> tuple[LabelAgreement, ...]:
    """Count agreement by label.

    Args:
        known: ``labels`` are the truth, not the baseline's own decisions.
    """
    every, counts = np.unique(labels, return_counts=True)
    found = []
    for label in every[np.argsort(-counts, kind="stable")][:MOST_LABELS]:
        of_it = labels == label
        one, other = before[of_it], after[of_it]
        told = LabelAgreement(f"{label:g}", int(of_it.sum()), int((one != other).sum()))
        if known:
            rights = [int((side == label).sum()) for side in (one, other)]
            told = replace(told, baseline_right=rights[0], candidate_right=rights[1])
        found.append(told)
    return tuple(found)
