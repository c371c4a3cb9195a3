"""The highest rate whose p99 stays within a bound, by a bounded bisection."""

from __future__ import annotations

import math
from collections.abc import Callable

#: The first rate that is tried, of what a closed loop reached: below the knee for most servers.
FIRST_SHARE = 0.75
#: While nothing has failed yet, or nothing passed.
GROWTH, SHRINK = 1.3, 0.5


def highest_rate(passes: Callable[[float], bool], capacity: float, probes: int) -> float | None:
    """The highest of ``probes`` rates that passed; None: none did.

    Rates grow until one fails or shrink until one passes; then the geometric middle of the two is
    tried.

    Args:
        capacity: requests a second that a closed loop got through, above 0.
    """
    rate, passed, failed = FIRST_SHARE * capacity, None, None
    for _ in range(probes):
        if passes(rate):
            passed = rate
        else:
            failed = rate
        if passed is None:
            rate *= SHRINK
        elif failed is None:
            rate *= GROWTH
        else:
            rate = math.sqrt(passed * failed)
    return passed
