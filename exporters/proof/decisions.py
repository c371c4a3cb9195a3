"""The decisions that callers take from an output: the largest value, or a threshold."""

from __future__ import annotations

import numpy as np

from modelport.exporters.model_spec import Decision, ModelSpec
from modelport.exporters.proof.parity_report import ParityReport
from modelport.gateway.types import Array


def decide(decision: Decision, values: Array) -> Array:
    """The decisions that ``values`` lead to: bool, or the index of the largest."""
    if decision.threshold is not None:
        return np.asarray(values >= decision.threshold)
    return np.asarray(values.argmax(axis=-1))


def defined_decisions(decision: Decision, defined: Array) -> Array:
    """The decisions whose values are all defined."""
    return defined if decision.threshold is not None else np.asarray(defined.all(axis=-1))


def count(
    decision: Decision,
    expected: Array,
    actual: Array,
    compared: Array | None,
    report: ParityReport,
    spec: ModelSpec,
) -> None:
    """Add the decisions of one batch to ``report``; ``compared`` None: all values count."""
    undecided = _undecided(decision, expected, report, spec)
    same = decide(decision, expected) == decide(decision, actual)
    if compared is not None:
        whole = defined_decisions(decision, compared)
        undecided, same = undecided[whole], same[whole]
    report.decisions += int((~undecided).sum())
    report.decisions_agreeing += int((same & ~undecided).sum())
    report.undecided += int(undecided.sum())


def _undecided(
    decision: Decision, reference: Array, report: ParityReport, spec: ModelSpec
) -> Array:
    """Mask of decisions that another value within tolerance would reverse; fp32 only.

    A tolerance widened on the command line does not widen this one.
    """
    if report.bounds is not None:
        return np.zeros(decide(decision, reference).shape, bool)
    if decision.threshold is not None:
        margin, size = np.abs(reference - decision.threshold), np.abs(reference)
    elif reference.shape[-1] < 2:
        return np.zeros(reference.shape[:-1], bool)
    else:
        second, first = np.moveaxis(np.partition(reference, -2, axis=-1)[..., -2:], -1, 0)
        margin, size = (first - second) / 2, np.maximum(np.abs(first), np.abs(second))
    atol, rtol = min(report.atol, spec.atol), min(report.rtol, spec.rtol)
    return np.asarray(margin <= atol + rtol * size)
