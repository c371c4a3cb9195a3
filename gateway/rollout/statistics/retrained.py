"""Differences of a retrained candidate's decisions and scores from the baseline's.

Two tables count the pairs of answers: by the decisions of both sides, and by both scores. A class
stands for all that are the same modulo ``CLASSES``. The limits are far from what a model that was
trained again does, and near enough to find one whose classes collapse or whose scores shift.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from modelport.gateway.rollout.statistics.counts import CLASSES, SCORE_BINS
from modelport.gateway.rollout.statistics.sequential_tests import (
    BoundedMeans,
    Floats,
    OddsRatios,
)

#: Scores that move by this many parts are no shift.
SCORE_MARGIN = 2


def pair_key(baseline: int, candidate: int, base: int) -> int:
    """The key of a pair in a table of counts."""
    return baseline % base * base + candidate % base


def dense(table: Mapping[int, int], base: int) -> tuple[int, ...]:
    """The counts of every pair of ``base`` values, by ``pair_key``."""
    found = [0] * base**2
    for key, count in table.items():
        found[key] = count
    return tuple(found)


def _changes() -> OddsRatios:
    """Alternatives for the decisions of each class that change: of all classes, or of one."""
    ratios = np.log(np.geomspace(1.3, 30, 10))
    one = np.kron(np.eye(CLASSES), ratios[:, None])
    both = np.vstack([np.repeat(ratios[:, None], CLASSES, axis=1), one])
    return OddsRatios(both, np.repeat([1.0, 1 / CLASSES], [len(ratios), len(one)]))


CLASS_CHANGES = _changes()


@lru_cache
def moves(criterion: str) -> tuple[Floats, Floats]:
    """The pairs that move in each way, and those that move back: [moves, pairs].

    Of ``class_shares``: the decision becomes a class, or no longer is it. Of ``scores``: the score
    rises above a value by more than the margin, or falls below it.
    """
    if criterion == "class_shares":
        values, base = np.arange(CLASSES)[:, None], CLASSES
    else:
        values, base = np.arange(1, SCORE_BINS - SCORE_MARGIN)[:, None], SCORE_BINS
    baseline, candidate = np.repeat(np.arange(base), base), np.tile(np.arange(base), base)
    if criterion == "class_shares":
        more, less = (
            (baseline == values, candidate == values),
            (baseline != values, candidate != values),
        )
    else:
        more = baseline >= values, candidate >= values + SCORE_MARGIN
        less = baseline < values + SCORE_MARGIN, candidate < values
    before, after = (np.vstack(sides) for sides in zip(more, less, strict=True))
    return (after & ~before).astype(np.float64), (before & ~after).astype(np.float64)


@lru_cache
def net_moves(criterion: str, limit: float) -> BoundedMeans:
    """The test that the pairs that move, less those that move back, are at most ``limit``."""
    moved, back = moves(criterion)
    return BoundedMeans(moved - back - limit)
