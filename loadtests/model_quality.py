"""Quality of answers with known labels: accuracy of an argmax, AUC of a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from modelport.gateway.repository.version_proof import VersionProof
from modelport.loadtests.load.payloads import Array, Tensors
from modelport.loadtests.users.answer_checker import ONLY
from modelport.loadtests.users.signature import RequestSignature

#: Bootstrap samples for a confidence interval.
RESAMPLES = 200
ACCURACY, AUC = "accuracy", "AUC"


@dataclass(frozen=True)
class Deciding:
    """The output with the decision: ``>= threshold``, or the argmax of the last axis."""

    output: str
    threshold: float | None = None

    def decisions(self, values: Array) -> Array:
        if self.threshold is None:
            return np.asarray(values.argmax(-1))
        return np.asarray(values >= self.threshold, np.int64)


@dataclass(frozen=True)
class Scored:
    """One side's decisions on the same rows, and their scores."""

    decisions: Array
    scores: Array


@dataclass(frozen=True)
class Quality:
    """``metric`` on ``rows``, with its confidence interval."""

    metric: str
    value: float
    low: float
    high: float
    rows: int


def deciding(
    proofs: Sequence[VersionProof], signature: RequestSignature, labelled: bool
) -> Deciding | None:
    """The decision in the first certificate that has one.

    Without one, but with labels, the model's only output decides: by argmax or, for a single
    number, by whether it is at least 0.5.
    """
    for proof in proofs:
        if proof.decision_output:
            return Deciding(proof.decision_output, proof.decision_threshold)
    if not labelled or len(signature.outputs) != 1:
        return None
    ((name, output),) = signature.outputs.items()
    single = not output.dims or output.dims[-1] == 1
    return Deciding(name, 0.5 if single else None)


def scored(decided: Deciding, answers: Sequence[Tensors]) -> Scored:
    """The decisions and scores in one side's answers.

    Raises:
        ValueError: an answer lacks the output.
    """
    values = []
    for answer in answers:
        name = decided.output if decided.output in answer else ONLY
        if name not in answer:
            raise ValueError(f"the response has no output '{decided.output}'")
        values.append(np.asarray(answer[name], np.float64))
    return Scored(
        np.concatenate([decided.decisions(one).ravel() for one in values]),
        np.concatenate([one.ravel() for one in values]),
    )


def truth_of(labels: Sequence[Array], decisions: int) -> Array:
    """All labels in one array.

    Raises:
        ValueError: there is not one label for each decision.
    """
    truth = np.concatenate([one.ravel() for one in labels])
    if truth.size != decisions:
        raise ValueError(f"{truth.size} labels for {decisions} decisions; give one for each")
    return truth


def metric_of(decided: Deciding, truth: Array) -> str:
    return ACCURACY if decided.threshold is None or len(np.unique(truth)) != 2 else AUC


def measure(metric: str, truth: Array, side: Scored) -> float:
    """``metric`` of one side."""
    if metric == ACCURACY:
        return float((side.decisions == truth).mean())
    from scipy.stats import mannwhitneyu

    positive = truth == truth.max()
    of, rest = side.scores[positive], side.scores[~positive]
    if not len(of) or not len(rest):
        return float("nan")
    # The share of pairs of a positive and a negative in the right order.
    return float(mannwhitneyu(of, rest).statistic) / (len(of) * len(rest))


def quality(decided: Deciding, truth: Array, side: Scored, confidence: float) -> Quality:
    """The metric of one side, with its interval."""
    metric = metric_of(decided, truth)
    low, high = interval(metric, truth, [side], confidence)
    return Quality(metric, measure(metric, truth, side), low, high, len(truth))


def interval(
    metric: str, truth: Array, sides: Sequence[Scored], confidence: float
) -> tuple[float, float]:
    """The confidence interval of one side's metric, or of the second side's loss.

    A bootstrap over rows, with the same rows for both sides.
    """
    generator = np.random.default_rng(0)
    found = []
    for _ in range(RESAMPLES):
        rows = generator.integers(0, len(truth), len(truth))
        values = [
            measure(metric, truth[rows], Scored(one.decisions[rows], one.scores[rows]))
            for one in sides
        ]
        value = values[0] - values[1] if len(values) > 1 else values[0]
        if np.isfinite(value):
            found.append(value)
    if not found:
        return float("-inf"), float("inf")
    tail = (1 - confidence) / 2
    low, high = np.quantile(found, (tail, 1 - tail))
    return float(low), float(high)
