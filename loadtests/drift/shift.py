"""Tests for a shift of each feature, corrected for their number.

- Numbers: the two-sample Kolmogorov-Smirnov test. Categories: the chi-squared test of homogeneity,
  with rare categories together. Missing values: Fisher's exact test.
- The population stability index (PSI) says how large a shift is: in deciles of the baseline, or
  categories.
- A feature has drifted if its corrected p-value is below alpha and the shift is not negligible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from scipy import stats

from modelport.loadtests.drift.features import MOST_CATEGORIES, Columns, FeatureName
from modelport.loadtests.load.payloads import Array

BINS = 10
#: Counted in addition to each bin, so that an empty one has a logarithm.
PSEUDO_COUNT = 0.5
#: Categories with fewer rows in both samples together are one.
RARE_ROWS = 10
#: Changes of a share that are not negligible, of missing values and of new categories.
NOTABLE_SHARE = 0.02
#: Fewer rows decide nothing.
LEAST_ROWS = 100
#: New categories that are named, and their characters.
MOST_NAMED, MOST_TEXT = 5, 80


class Correction(StrEnum):
    """Corrections for the number of tests: of the family-wise error, or of false discoveries."""

    HOLM = "holm"
    BENJAMINI_HOCHBERG = "benjamini-hochberg"


@dataclass(frozen=True)
class FeatureShift:
    """The shift of one feature.

    Attributes:
        kind: ``numbers`` or ``categories``.
        statistic: Of Kolmogorov and Smirnov, or Cramér's V.
        missing: Shares of missing values, before and now.
        new: Categories that the baseline lacks, and their share of the rows.
    """

    feature: FeatureName
    kind: str
    rows: tuple[int, int]
    psi: float
    statistic: float
    p_value: float
    missing: tuple[float, float]
    missing_p_value: float
    new: tuple[str, ...] = ()
    new_share: float = 0.0
    means: tuple[float, float] | None = None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drift:
    """The shifts of all features, those that have drifted first."""

    shifts: tuple[FeatureShift, ...]
    alpha: float
    threshold: float
    correction: Correction
    #: Features that only one side has, and features with too few rows.
    notes: tuple[str, ...] = field(default=())

    @property
    def drifted(self) -> tuple[FeatureShift, ...]:
        return tuple(each for each in self.shifts if each.reasons)


def compare(
    before: Columns,
    now: Columns,
    alpha: float = 0.05,
    threshold: float = 0.1,
    correction: Correction = Correction.HOLM,
) -> Drift:
    """Test all features that both sides have.

    Args:
        alpha: Probability of any false alarm (Holm), or share of false ones (Benjamini-Hochberg).
        threshold: PSI from which a shift is not negligible.
    """
    notes, raw = [], []
    for name in before.keys() | now.keys():
        if name not in now or name not in before:
            where = "the baseline" if name not in before else "the records"
            notes.append(f"{name.side} '{name.name}' is missing in {where}")
        elif min(len(before[name]), len(now[name])) < LEAST_ROWS:
            notes.append(f"{name.side} '{name.name}' has fewer than {LEAST_ROWS} rows")
        else:
            raw.append(_shift(name, before[name], now[name]))
    p_values = [p for each in raw for p in (each.p_value, each.missing_p_value)]
    corrected = adjusted(p_values, correction)
    shifts = []
    for number, each in enumerate(raw):
        p, missing_p = corrected[2 * number : 2 * number + 2]
        reasons = []
        if p < alpha and each.psi >= threshold:
            reasons.append("distribution")
        if p < alpha and each.new_share >= NOTABLE_SHARE:
            reasons.append("new categories")
        if missing_p < alpha and abs(each.missing[1] - each.missing[0]) >= NOTABLE_SHARE:
            reasons.append("missing values")
        done = replace(each, p_value=float(p), missing_p_value=float(missing_p))
        shifts.append(replace(done, reasons=tuple(reasons)))
    shifts.sort(key=lambda each: (not each.reasons, each.p_value, -each.psi, each.feature))
    return Drift(tuple(shifts), alpha, threshold, correction, tuple(sorted(notes)))


def adjusted(p_values: Sequence[float], correction: Correction) -> Array:
    """The p-values, corrected for their number."""
    if not p_values:
        return np.array([])
    if correction is Correction.BENJAMINI_HOCHBERG:
        return np.asarray(stats.false_discovery_control(p_values))
    order = np.argsort(p_values)
    steps = np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1)
    made = np.empty(len(p_values))
    made[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return made


def psi(before: Array, now: Array) -> float:
    """The population stability index of the counts in the same bins."""
    p, q = (
        (each + PSEUDO_COUNT) / (each.sum() + PSEUDO_COUNT * len(each)) for each in (before, now)
    )
    return float(((q - p) * np.log(q / p)).sum())


def _shift(name: FeatureName, before: Array, now: Array) -> FeatureShift:
    is_text = before.dtype.kind == "O" or now.dtype.kind == "O"
    gone = [_missing(each) for each in (before, now)]
    one, other = before[~gone[0]], now[~gone[1]]
    counts = [int(each.sum()) for each in gone]
    missing_p = 1.0
    if any(counts):
        table = [[count, len(each) - count] for count, each in zip(counts, gone, strict=True)]
        missing_p = float(stats.fisher_exact(table).pvalue)
    made = FeatureShift(
        name, "numbers", (len(before), len(now)), 0.0, 0.0, 1.0,
        (counts[0] / len(before), counts[1] / len(now)), missing_p,
    )  # fmt: skip
    if not len(one) or not len(other):
        return made
    if is_text and len(set(one.tolist())) > MOST_CATEGORIES:  # texts, described by their lengths
        one, other = (np.array([len(str(each)) for each in side], float) for side in (one, other))
        is_text = False
    if is_text or _are_categories(one):
        return _categories(made, one, other)
    return _numbers(made, one, other)


def _missing(column: Array) -> Array:
    if column.dtype.kind == "O":
        return np.array([each is None or each != each for each in column.tolist()], bool)
    return np.isnan(column)


def _are_categories(column: Array) -> bool:
    """Whether numbers are few integers."""
    distinct = np.unique(column)
    is_whole = np.isfinite(distinct) & (distinct == np.floor(distinct))
    return len(distinct) <= MOST_CATEGORIES and bool(is_whole.all())


def _numbers(made: FeatureShift, one: Array, other: Array) -> FeatureShift:
    test = stats.ks_2samp(one, other, method="asymp")
    edges = _edges(one)
    counts = [
        np.bincount(np.searchsorted(edges, each, side="right"), minlength=len(edges) + 1)
        for each in (one, other)
    ]
    finite = [each[np.isfinite(each)] for each in (one, other)]
    with np.errstate(over="ignore"):
        one_mean, other_mean = (float(np.mean(each)) if len(each) else np.nan for each in finite)
    is_known = np.isfinite([one_mean, other_mean]).all()
    return replace(
        made,
        psi=psi(*counts),
        statistic=float(test.statistic),
        p_value=float(test.pvalue),
        means=(one_mean, other_mean) if is_known else None,
    )


def _edges(column: Array) -> Array:
    """The deciles; a value of many rows has a bin of its own."""
    ordered = np.sort(column)
    deciles = np.unique(ordered[len(ordered) * np.arange(1, BINS) // BINS])
    count = np.searchsorted(ordered, deciles, "right") - np.searchsorted(ordered, deciles, "left")
    atoms = deciles[count * 2 * BINS > len(ordered)]
    return np.unique(np.concatenate([deciles, np.nextafter(atoms, np.inf)]))


def _categories(made: FeatureShift, one: Array, other: Array) -> FeatureShift:
    counts = [Counter(each.tolist()) for each in (one, other)]
    new = [each for each, _ in counts[1].most_common() if each not in counts[0]]
    table = _table(counts[0], counts[1])
    p_value, statistic = 1.0, 0.0
    if table.shape[1] > 1:
        test = stats.chi2_contingency(table, correction=False)
        p_value, statistic = float(test.pvalue), float(np.sqrt(test.statistic / table.sum()))
    return replace(
        made,
        kind="categories",
        psi=psi(table[0], table[1]),
        statistic=statistic,
        p_value=p_value,
        new=tuple(str(each)[:MOST_TEXT] for each in new[:MOST_NAMED]),
        new_share=sum(counts[1][each] for each in new) / len(other),
    )


def _table(before: Counter[object], now: Counter[object]) -> Array:
    """Counts of both sides by category, the rare ones together."""
    rows, rare = [], [0, 0]
    for each in sorted(before.keys() | now.keys(), key=repr):
        pair = [before[each], now[each]]
        if sum(pair) < RARE_ROWS:
            rare = [a + b for a, b in zip(rare, pair, strict=True)]
        else:
            rows.append(pair)
    if sum(rare):
        rows.append(rare)
    return np.array(rows, float).T
