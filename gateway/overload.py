"""Whether a model is overloaded: more requests keep coming than are answered.

The length of a queue does not tell. Any number of clients of which each waits for its answer (a
closed loop) makes a queue as long as they are many, which stands: so many answers, so many new
requests. Only where requests come whatever becomes of others (an open loop) does it grow without
end. So what is compared is arrivals and answers, over slots of time; and a queue that a burst or
some clients explain is left alone.
"""

from __future__ import annotations

import math
import weakref

#: So long is a slot at least, and so many arrivals, but never longer than the last.
SLOT_SECONDS = 0.05
SLOT_ARRIVALS = 16
MAX_SLOT_SECONDS = 1.0
#: A slot in which so many times as many came as were answered, and some more, has grown.
GROWTH = 1.25
GRACE = 4
#: So many of those in a row are an overload.
GROWN_SLOTS = 4
#: While overloaded: in flight per request that is being computed. As many wait as run.
IN_FLIGHT = 2.2
#: The weight of what went before a slot, in the mean of how many are computed at a time.
MEMORY = 0.8


class Detector:
    """Counts, and bounds the requests in flight while there is an overload.

    Args:
        instances: run at a time, at least.
        least: that many requests in flight are no overload.
    """

    __slots__ = (
        "__weakref__", "_answered", "_arrived", "_computed_seconds", "_grown", "_instances",
        "_least", "_seconds", "_started", "limit",
    )  # fmt: skip

    def __init__(self, instances: int, least: int) -> None:
        self._instances = instances
        self._least = least
        #: So many may be in flight; infinite: it is not overloaded.
        self.limit = math.inf
        # The slot at hand.
        self._started = 0.0
        self._arrived = self._answered = 0
        #: How many slots in a row have grown.
        self._grown = 0
        # Decayed sums: what the answers took to compute, and the time in which they were computed.
        self._computed_seconds = self._seconds = 0.0

    def arrived(self, now: float, in_flight: int) -> bool:
        """One comes, to be refused or not. Whether just now an overload was found."""
        self._arrived += 1
        elapsed = now - self._started
        if elapsed < SLOT_SECONDS:
            return False
        if elapsed > MAX_SLOT_SECONDS:  # there were hardly any: they are no overload
            self._answered = max(self._answered, self._arrived)
        elif self._arrived < SLOT_ARRIVALS:
            return False
        return self._turn(now, elapsed, in_flight)

    def answered(self, computed_seconds: float) -> None:
        self._answered += 1
        self._computed_seconds += computed_seconds

    def _turn(self, now: float, elapsed: float, in_flight: int) -> bool:
        """A slot is over."""
        grown = self._arrived > GROWTH * self._answered + GRACE
        self._grown = self._grown + 1 if grown else 0
        self._seconds += elapsed
        before = self.limit
        self.limit = self._next(grown, in_flight)
        if self.limit != math.inf:
            OVERLOADED.add(self)
        elif before != math.inf:
            OVERLOADED.discard(self)
        self._started, self._arrived, self._answered = now, 0, 0
        self._computed_seconds *= MEMORY
        self._seconds *= MEMORY
        return before == math.inf and self.limit != math.inf

    def _next(self, grown: bool, in_flight: int) -> float:
        """The limit from now on."""
        if self.limit == math.inf:
            begins = self._grown >= GROWN_SLOTS and in_flight > self._least
            return self._lowest() if begins else math.inf
        if grown:
            return self._lowest()
        # It ends, step by step: the overload may only have paused.
        return self.limit * 2 if self.limit * 2 <= self._least else math.inf

    def _lowest(self) -> float:
        """So few in flight that no instance is ever without work, and no more."""
        at_a_time = self._computed_seconds / self._seconds
        return math.floor(IN_FLIGHT * max(self._instances, at_a_time))


#: Those that are overloaded now: while there are none nobody needs to ask which it is. The event
#: loop alone changes it.
OVERLOADED: weakref.WeakSet[Detector] = weakref.WeakSet()
