"""Ties and thresholds inside a model: where rounding decides, another answer is right, too.

An index may differ from the checkpoint's where the values that it chooses among are equal within
the tolerance. Any other answer may differ if the model itself gives it as soon as the values that
it branches by (top-k, argmax, sort, comparisons, rounding) move within the tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from modelport.exporters.loaded_model import Diagnostics
from modelport.exporters.tolerance import Tolerance
from modelport.gateway.types import Array

Answers = Mapping[str, Array]


def accepted(
    diagnostics: Diagnostics,
    tolerance: Tolerance,
    margin: Tolerance,
    inputs: Answers,
    expected: Answers,
    actual: Answers,
    outside: dict[str, Array],
    batch: int,
) -> dict[str, Array]:
    """The values of each output that are right although they differ from ``expected``.

    Args:
        margin: the distance of values that count as equal.
        outside: the values that differ; those that are right are cleared.
        batch: rows of the batch; 0 if the model does not batch.
    """
    found = {name: np.zeros(where.shape, bool) for name, where in outside.items()}
    selections = diagnostics.selections(inputs)
    for name, where in outside.items():
        if where.any() and expected[name].dtype.kind in "iu":
            found[name] = where & _tied(selections, margin, expected[name], actual[name])
            outside[name] = where & ~found[name]
    left = _rows(outside, batch)
    if not left.any():
        return found
    for other in diagnostics.other_branches(inputs, margin.atol, margin.rtol):
        same = left & ~_rows(_differences(tolerance, other, actual), batch)
        for where in found.values():
            _mark(where, same, batch)
        left &= ~same
        if not left.any():
            break
    for name, where in found.items():
        outside[name] = outside[name] & ~where
    return found


def _differences(tolerance: Tolerance, other: Answers, actual: Answers) -> dict[str, Array]:
    """The values that differ; all of an output that has another shape."""
    return {
        name: tolerance.outside(values, actual[name])
        if values.shape == actual[name].shape
        else np.ones(actual[name].shape, bool)
        for name, values in other.items()
    }


def _mark(where: Array, rows: Array, batch: int) -> None:
    """Set the values in ``rows``."""
    if batch:
        where[rows] = True
    elif rows[0]:
        where[...] = True


def _rows(outside: Answers, batch: int) -> Array:
    """The rows of a batch with a value that is outside, in any output."""
    rows = np.zeros(batch or 1, bool)
    for where in outside.values():
        rows |= where.reshape(batch or 1, -1).any(axis=1)
    return rows


def _tied(
    selections: list[tuple[Array, Array, int]],
    margin: Tolerance,
    expected: Array,
    actual: Array,
) -> Array:
    """The indices in ``actual`` whose values equal those at ``expected``'s within tolerance."""
    for values, chosen, axis in selections:
        if chosen.size != expected.size or (chosen.ravel() != expected.ravel()).any():
            continue
        theirs = actual.reshape(chosen.shape)
        if ((theirs < 0) | (theirs >= values.shape[axis])).any():
            continue
        ordered = np.sort(theirs, axis=axis)
        twice = (np.diff(ordered, axis=axis) == 0).any(axis=axis, keepdims=True)
        here = np.take_along_axis(values, chosen, axis)
        there = np.take_along_axis(values, theirs, axis)
        close = margin.ratio(here, there) <= 2  # either may be off by the tolerance
        return np.asarray((close & ~twice).reshape(expected.shape))
    return np.zeros(expected.shape, bool)
