"""Load shapes over time: the number of active users, or the times at which requests are due.

=========  ==========================================  ==========================================
shape      closed loop: users in flight                open loop: intended requests a second
=========  ==========================================  ==========================================
constant   all of them                                 ``rate``
ramp       from a tenth of them to all                 from a tenth of ``rate`` to ``rate``
spike      a fifth; all in the middle fifth            a fifth of ``rate``; ``rate`` in the middle
soak       all of them, for long                       ``rate``, for long
=========  ==========================================  ==========================================

The warm-up comes first, at the shape's initial level. The times of an open loop are fixed before
the first request is sent, so the server cannot delay them (no coordinated omission).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from modelport.loadtests.load.samples import LoadProfile

SHAPES = ("constant", "ramp", "spike", "soak")
#: Initial level of a ramp and of a spike, as shares of the top.
RAMP_FROM, SPIKE_FROM = 0.1, 0.2
#: Begin and end of a spike, as shares of the duration.
SPIKE_BEGIN, SPIKE_END = 0.4, 0.6
#: Resolution of the rate's integral, which determines the times.
STEPS_PER_SECOND, MOST_STEPS = 1000, 4_000_000


def level(shape: str, progress: Any) -> Any:
    """The share of the top, 0 to 1, at ``progress`` (0 to 1; below 0: warm-up)."""
    progress = np.asarray(progress, np.float64)
    if shape == "ramp":
        return RAMP_FROM + (1 - RAMP_FROM) * np.clip(progress, 0.0, 1.0)
    if shape == "spike":
        up = (progress >= SPIKE_BEGIN) & (progress < SPIKE_END)
        return np.where(up, 1.0, SPIKE_FROM)
    if shape in ("constant", "soak"):
        return np.ones_like(progress)
    raise ValueError(f"shape '{shape}' must be one of {', '.join(SHAPES)}")


def active_users(load: LoadProfile, seconds: float) -> int:
    """The number of active users of a closed loop at that time, at least one."""
    progress = (seconds - load.warmup_seconds) / load.duration_seconds
    return max(1, math.ceil(load.users * float(level(load.shape, progress)) - 1e-9))


def next_change(load: LoadProfile, user: int, seconds: float) -> float:
    """The next time at or after ``seconds`` when ``user`` (from 0) is active; inf: never."""
    if active_users(load, seconds) > user:
        return seconds
    end = load.warmup_seconds + load.duration_seconds
    for moment in np.linspace(seconds, end, max(2, int((end - seconds) * 20)), endpoint=False):
        if active_users(load, float(moment)) > user:
            return float(moment)
    return math.inf


def arrivals(load: LoadProfile, share: float = 1.0, offset: float = 0.0) -> npt.NDArray[np.float64]:
    """Due times of the requests in seconds from the beginning, warm-up included.

    Requests are spaced evenly at the current rate: they are due when the rate's integral passes
    whole numbers.

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
