"""Candidate against baseline on the same requests: a report, and accuracy as a limit.

A model that was trained again answers otherwise than its predecessor, and may. The report says how
often their decisions differ, and for which labels; where the true labels are known, accuracy (of an
argmax) or AUC (of a threshold) may fall by so much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from loadtests.payloads import Array, Tensors
from loadtests.users.answers import ONLY
from loadtests.users.signature import Signature

#: Of labels, the most rows first.
MOST_LABELS = 20
#: Samples of the bootstrap that says how sure a difference is.
RESAMPLES = 200


@dataclass(frozen=True)
class Deciding:
    """The output that a caller decides from: ``>= threshold``, or the argmax of the last axis."""

    output: str
    threshold: float | None = None

    def decisions(self, values: Array) -> Array:
        if self.threshold is None:
            return np.asarray(values.argmax(-1))
        return np.asarray(values >= self.threshold, np.int64)


@dataclass(frozen=True)
class LabelAgreement:
    """The rows of one label: a true one, or a decision of the baseline's."""

    label: str
    rows: int
    changed: int
    #: Rows that were decided rightly; None where the truth is not known.
    baseline_right: int | None = None
    candidate_right: int | None = None


@dataclass(frozen=True)
class Agreement:
    """How the answers of both sides to the same requests differ.

    ``decisions`` is 0 where the model declares none. ``metric`` is ``accuracy`` or ``AUC``; empty
    without labels. ``low`` and ``high`` are the interval of what the candidate lost.
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
        """What the candidate lost of the metric."""
        if self.baseline is None or self.candidate is None:
            return None
        return self.baseline - self.candidate


def deciding(
    certificates: Sequence[Mapping[str, Any]], signature: Signature, labelled: bool
) -> Deciding | None:
    """What is decided, as the first certificate says that does.

    Where none does and there are labels, the one output of the model is: its argmax, or, of a
    single number, whether it is at least 0.5.
    """
    for one in certificates:
        try:
            declared = one["parity"]["decision"]
            kind = str(declared["kind"])
            threshold = None if kind == "argmax" else float(kind.removeprefix(">= "))
            return Deciding(str(declared["output"]), threshold)
        except (KeyError, TypeError, ValueError):
            continue
    if not labelled or len(signature.outputs) != 1:
        return None
    ((name, output),) = signature.outputs.items()
    single = not output.dims or output.dims[-1] == 1
    return Deciding(name, 0.5 if single else None)


def compared(
    baseline: Sequence[Tensors],
    candidate: Sequence[Tensors],
    decided: Deciding | None,
    labels: Sequence[Array] | None,
    confidence: float,
) -> Agreement:
    """Both sides' answers to the same requests, the batch first.

    Raises:
        ValueError: the labels are not one for each decision; an answer lacks the output.
    """
    found = Agreement(len(baseline), _relative_error(baseline, candidate))
    if decided is None:
        return found
    values = [
        [np.asarray(_output(answer, decided.output), np.float64) for answer in side]
        for side in (baseline, candidate)
    ]
    before, after = (
        np.concatenate([decided.decisions(one).ravel() for one in side]) for side in values
    )
    known = labels is not None
    truth = before if labels is None else np.concatenate([one.ravel() for one in labels])
    if truth.size != before.size:
        raise ValueError(f"{truth.size} labels for {before.size} decisions; give one for each")
    found = replace(
        found,
        decisions=len(before),
        changed=int((before != after).sum()),
        by_label=_by_label(truth, before, after, known=known),
    )
    if not known:
        return found
    scores = [np.concatenate([one.ravel() for one in side]) for side in values]
    metric, (mine, other) = _measured(decided, truth, (before, after), scores)
    low, high = _interval(decided, truth, (before, after), scores, confidence)
    return replace(found, metric=metric, baseline=mine, candidate=other, low=low, high=high)


def _output(answer: Tensors, name: str) -> Array:
    if name not in answer and ONLY not in answer:
        raise ValueError(f"there is no output '{name}' in the answer")
    return answer.get(name, answer[ONLY] if ONLY in answer else np.empty(0))


def _relative_error(baseline: Sequence[Tensors], candidate: Sequence[Tensors]) -> float:
    """Over all outputs that are numbers and of one shape."""
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
    """Args: known: ``labels`` are the truth, not the baseline's own decisions."""
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


def _measured(
    decided: Deciding, truth: Array, decisions: Sequence[Array], scores: Sequence[Array]
) -> tuple[str, list[float]]:
    """The metric, and each side's."""
    if decided.threshold is None or len(np.unique(truth)) != 2:
        return "accuracy", [float((side == truth).mean()) for side in decisions]
    positive = truth == truth.max()
    return "AUC", [_auc(positive, side) for side in scores]


def _auc(positive: Array, scores: Array) -> float:
    """The part of pairs of a positive and a negative that ``scores`` orders rightly."""
    from scipy.stats import mannwhitneyu

    of, rest = scores[positive], scores[~positive]
    if not len(of) or not len(rest):
        return float("nan")
    return float(mannwhitneyu(of, rest).statistic) / (len(of) * len(rest))


def _interval(
    decided: Deciding,
    truth: Array,
    decisions: Sequence[Array],
    scores: Sequence[Array],
    confidence: float,
) -> tuple[float, float]:
    """Of what the candidate lost, by a bootstrap over rows: both sides keep their pairs."""
    generator = np.random.default_rng(0)
    lost = []
    for _ in range(RESAMPLES):
        rows = generator.integers(0, len(truth), len(truth))
        if len(np.unique(truth[rows])) < len(np.unique(truth)):
            continue
        _, (before, after) = _measured(
            decided,
            truth[rows],
            [side[rows] for side in decisions],
            [side[rows] for side in scores],
        )
        lost.append(before - after)
    if not lost:
        return float("-inf"), float("inf")
    tail = (1 - confidence) / 2
    low, high = np.quantile(lost, (tail, 1 - tail))
    return float(low), float(high)
