"""The errors of `modelport drift`, measured on simulated days of traffic.

    python -m tests.drift_statistics

A day has 5,000 rows of 50 features: numbers with light and heavy tails, counts, categories, and
values that are missing. On identical days the report may be wrong at most once in twenty, also
without the threshold that hides small shifts; a shift of half a standard deviation in one feature
is to be found in 95 of 100 days. Without a correction for their number, the tests must be wrong
far more often: otherwise this program would measure nothing.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from scipy import stats

from modelport.loadtests.drift import shift
from modelport.loadtests.drift.features import INPUT, Columns, FeatureName
from modelport.loadtests.drift.shift import Correction

ROWS, FEATURES, DAYS, SHIFTED_DAYS = 5_000, 50, 1_000, 200
MOST_FALSE, LEAST_FOUND, SHIFT = 0.05, 0.95, 0.5
#: A measured share refutes a limit only beyond chance.
CONFIDENCE = 0.999


def day(chance: np.random.Generator, shifted: int | None = None) -> Columns:
    """The features of one day; the numbers of feature ``shifted`` have moved."""
    found: Columns = {}
    for number in range(FEATURES):
        kind = number % 5
        if kind in (0, 1):
            column = chance.normal(size=ROWS)
        elif kind == 2:
            column = chance.standard_t(3, size=ROWS) / np.sqrt(3)
        elif kind == 3:
            column = chance.poisson(3.0, size=ROWS).astype(float)
        else:
            column = chance.choice(8, size=ROWS, p=np.arange(1, 9) / 36).astype(float)
        if kind == 1:
            column[chance.random(ROWS) < 0.05] = np.nan
        if number == shifted:
            column = column + SHIFT * np.nanstd(column)
        found[FeatureName(INPUT, f"x[{number}]")] = column
    return found


def share(count: int, of: int) -> tuple[float, float, float]:
    """A share with its confidence interval (Clopper and Pearson)."""
    found = stats.binomtest(count, of).proportion_ci(CONFIDENCE)
    return count / of, float(found.low), float(found.high)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--days", type=int, default=DAYS)
    days = parser.parse_args().days
    chance = np.random.default_rng(37)
    before = day(chance)
    alarms = dict.fromkeys(("default", "no threshold", "no correction"), 0)
    for number in range(days):
        if not number % 20:
            before = day(chance)
        now = day(chance)
        alarms["default"] += bool(shift.compare(before, now).drifted)
        bare = shift.compare(before, now, threshold=0.0)
        alarms["no threshold"] += bool(bare.drifted)
        p_values = [
            stats.ks_2samp(before[name], now[name], method="asymp").pvalue
            for name in before
            if not np.isnan(before[name]).any()
        ]
        alarms["no correction"] += min(p_values) < MOST_FALSE
    kept = True
    for name, count in alarms.items():
        found, low, high = share(count, days)
        print(f"identical days, {name}: {found:.1%} alarms ({low:.1%} to {high:.1%})", flush=True)
        kept = kept and (low > MOST_FALSE) == (name == "no correction")
        if name == "default":
            kept = kept and found <= MOST_FALSE
    for correction in Correction:
        hits = 0
        for number in range(SHIFTED_DAYS):
            moved = number % FEATURES
            if moved % 5 == 4:
                moved -= 1  # a category has no standard deviation
            drifted = shift.compare(before, day(chance, moved), correction=correction).drifted
            hits += any(each.feature.name == f"x[{moved}]" for each in drifted)
        found, low, high = share(hits, SHIFTED_DAYS)
        text = f"a shift of {SHIFT} standard deviations, {correction}"
        print(f"{text}: found in {found:.1%} ({low:.1%} to {high:.1%})", flush=True)
        kept = kept and found >= LEAST_FOUND
    print("kept" if kept else "NOT kept")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
