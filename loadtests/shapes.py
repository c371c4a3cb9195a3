"""The shapes of a load over time: how many users ask, or at which moments requests are due.

=========  ==========================================  ==========================================
shape      closed loop: users in flight                open loop: intended requests a second
=========  ==========================================  ==========================================
constant   all of them                                 ``rate``
ramp       from a tenth of them to all                 from a tenth of ``rate`` to ``rate``
spike      a fifth; all in the middle fifth            a fifth of ``rate``; ``rate`` in the middle
soak       all of them, for long                       ``rate``, for long
=========  ==========================================  ==========================================

The warm-up comes first, at what the shape begins with. The moments of an open loop are fixed before
the first request leaves: nothing that the server does moves them (no coordinated omission).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from modelport.loadtests.samples import Load

SHAPES = ("constant", "ramp", "spike", "soak")
#: What a ramp begins with, and a spike rises from, as shares of the top.
RAMP_FROM, SPIKE_FROM = 0.1, 0.2
#: When a spike is up, as shares of the duration.
SPIKE_BEGIN, SPIKE_END = 0.4, 0.6
#: Of the integral of the rate, from which the moments come.
STEPS_PER_SECOND, MOST_STEPS = 1000, 4_000_000


def level(shape: str, progress: Any) -> Any:
    """The share of the top, 0 to 1, when ``progress`` (0 to 1; below 0: warm-up) has passed."""
    progress = np.asarray(progress, np.float64)
    if shape == "ramp":
        return RAMP_FROM + (1 - RAMP_FROM) * np.clip(progress, 0.0, 1.0)
    if shape == "spike":
        up = (progress >= SPIKE_BEGIN) & (progress < SPIKE_END)
        return np.where(up, 1.0, SPIKE_FROM)
    if shape in ("constant", "soak"):
        return np.ones_like(progress)
    raise ValueError(f"shape '{shape}' is none of {', '.join(SHAPES)}")


def active_users(load: Load, seconds: float) -> int:
    """How many of a closed loop ask, that many seconds after the beginning; at least one."""
    progress = (seconds - load.warmup_seconds) / load.duration_seconds
    return max(1, math.ceil(load.users * float(level(load.shape, progress)) - 1e-9))


def next_change(load: Load, user: int, seconds: float) -> float:
    """When ``user`` (from 0) of a closed loop asks next, at ``seconds`` or later; inf: never."""
    if active_users(load, seconds) > user:
        return seconds
    end = load.warmup_seconds + load.duration_seconds
    for moment in np.linspace(seconds, end, max(2, int((end - seconds) * 20)), endpoint=False):
        if active_users(load, float(moment)) > user:
            return float(moment)
    return math.inf


def arrivals(load: Load, share: float = 1.0, offset: float = 0.0) -> npt.NDArray[np.float64]:
    """Seconds [requests] from the beginning, warm-up included, at which requests are due.

    Evenly spaced at the rate of the moment: where the rate's integral passes whole numbers.

    Args:
        share: of the rate that this process sends.
        offset: 0 to 1, of the spacing; different for each process, so that they alternate.
    """
    assert load.rate is not None
    total = load.warmup_seconds + load.duration_seconds
    steps = min(int(total * STEPS_PER_SECOND), MOST_STEPS)
    grid = np.linspace(0.0, total, max(2, steps + 1))
    rate = (
        load.rate * share * level(load.shape, (grid - load.warmup_seconds) / load.duration_seconds)
    )
    areas = (rate[1:] + rate[:-1]) / 2 * np.diff(grid)
    passed = np.concatenate([[0.0], np.cumsum(areas)])
    wanted = np.arange(offset, passed[-1] - 1e-9)
    return np.asarray(np.interp(wanted, passed, grid), np.float64)
