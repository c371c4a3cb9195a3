"""The overload controller of a model: when requests are refused, and when no longer. Pure.

The length of a queue does not tell an overload. Any number of clients of which each waits for its
answer (a closed loop) makes a queue as long as they are many, which stands: a new request for each
answer. Only where requests come whatever becomes of others (an open loop) does it grow without end.
So an overload *begins* when arrivals exceed answers for some slots of time in a row. Then few
requests are in flight, and those beyond are refused at once.

Arrivals cannot tell that it has *ended*: a client that is refused and tries again at once counts a
thousand times a second, though it would be one request in flight if it were let in. So every now
and then a *probe* refuses nobody for some milliseconds: what would be refused is *held*. Clients of
a closed loop are soon held all, and then no more come than are answered: the overload has ended,
and they are let in. Where more keep coming it has not, and those that were held are refused.
"""

from __future__ import annotations

import math
import weakref
from enum import Enum

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
#: A probe. What comes in its second half decides.
PROBE_SECONDS = 0.04
MAX_HELD = 4096
#: From the beginning of an overload to its first probe; after each that fails, twice as long.
FIRST_PROBE_SECONDS = 0.25
MAX_PROBE_INTERVAL_SECONDS = 1.0
#: After an overload so long: it begins again when more come than the probe has seen.
PROBATION_SECONDS = 2.0
PROBATION_GROWTH, PROBATION_GRACE = 2, 8


class AdmissionDecision(Enum):
    """What becomes of a request that has come."""

    ADMIT = "admit"
    HOLD = "hold"
    REFUSE = "refuse"


class OverloadController:
    """Counts, and bounds the requests in flight while there is an overload.

    Args:
        instances: run at a time, at least.
        least: that many requests in flight are no overload.
    """

    __slots__ = (
        "__weakref__", "_answered", "_arrived", "_computed_seconds", "_exceeded", "_grown",
        "_instances", "_interval_seconds", "_late_answered", "_late_arrived", "_least",
        "_probation_ends", "_probe_at", "_probe_began", "_seconds", "_started", "_sustained",
        "held", "limit",
    )  # fmt: skip

    def __init__(self, instances: int, least: int) -> None:
        self._instances = instances
        self._least = least
        #: So many may be in flight; infinite: it is not overloaded.
        self.limit = math.inf
        #: Requests that wait for the end of a probe.
        self.held = 0
        # The slot at hand, and how many in a row have grown.
        self._started = 0.0
        self._arrived = self._answered = 0
        self._grown = 0
        #: In this slot, more came than may be in flight.
        self._exceeded = False
        # Decayed sums: what the answers took to compute, and the time in which they were computed.
        self._computed_seconds = self._seconds = 0.0
        # The probe at hand, if it began at a time above 0; else when the next one begins.
        self._probe_began = self._probe_at = 0.0
        self._interval_seconds = FIRST_PROBE_SECONDS
        self._late_arrived = self._late_answered = 0
        # Until when an overload begins again with more than ``_sustained`` requests in flight.
        self._probation_ends = 0.0
        self._sustained = 0

    @property
    def probing(self) -> bool:
        return self._probe_began > 0

    def _probe_is_due(self, now: float) -> bool:
        """Whether there is a probe, or the next request begins one."""
        return self.probing or now >= self._probe_at

    def refuses_unread(self, now: float, before: int) -> bool:
        """Whether a request of which nothing is known yet is refused; it is then counted."""
        if before < self.limit or self._probe_is_due(now):
            return False
        self._exceeded = True
        self.arrived(now, before)
        return before >= self.limit

    def arrived(self, now: float, in_flight: int) -> bool:
        """Count one, to be refused or not. Whether just now an overload begins."""
        self._arrived += 1
        elapsed = now - self._started
        if elapsed < SLOT_SECONDS:
            return False
        if elapsed > MAX_SLOT_SECONDS:  # there were hardly any: they are no overload
            self._answered = max(self._answered, self._arrived)
        elif self._arrived < SLOT_ARRIVALS:
            return False
        return self._turn(now, elapsed, in_flight)

    def judge(self, now: float, before: int) -> AdmissionDecision:
        """What becomes of a request that has come and has ``before`` others in front of it."""
        if before < self.limit:
            return AdmissionDecision.ADMIT
        self._exceeded = True
        if not self.probing:
            if not self._probe_is_due(now):
                return AdmissionDecision.REFUSE
            self._probe_began = now
            self._late_arrived = self._late_answered = 0
        if now - self._probe_began >= PROBE_SECONDS / 2:
            if not self._late_arrived:
                self._late_answered = 0
            self._late_arrived += 1
            if self._more_came_than_were_answered():
                return AdmissionDecision.REFUSE
        return AdmissionDecision.HOLD if self.held < MAX_HELD else AdmissionDecision.REFUSE

    def failed_probe(self) -> bool:
        """Whether the probe at hand has failed already."""
        return self.probing and (self._more_came_than_were_answered() or self.held >= MAX_HELD)

    def end_probe(self, now: float, in_flight: int) -> bool:
        """Whether the overload has ended, and those that are held are let in."""
        ended = not self.failed_probe()
        self._probe_began = 0.0
        if ended:
            self._end(now, in_flight + self.held)
        else:
            self._probe_at = now + self._interval_seconds
            self._interval_seconds = min(MAX_PROBE_INTERVAL_SECONDS, 2 * self._interval_seconds)
        return ended

    def answered(self, computed_seconds: float) -> None:
        self._answered += 1
        self._late_answered += 1
        self._computed_seconds += computed_seconds

    def _more_came_than_were_answered(self) -> bool:
        return self._late_arrived > GROWTH * self._late_answered + GRACE

    def _turn(self, now: float, elapsed: float, in_flight: int) -> bool:
        """A slot is over."""
        grown = self._arrived > GROWTH * self._answered + GRACE
        self._grown = self._grown + 1 if grown else 0
        self._seconds += elapsed
        begins = False
        if self.limit != math.inf:
            self.limit = self._lowest()
            if not grown and not self._exceeded:
                self._end(now, in_flight)
        elif now < self._probation_ends:
            begins = grown and in_flight > self._sustained
        else:
            begins = self._grown >= GROWN_SLOTS and in_flight > self._least
        if begins:
            self._begin(now)
        self._started, self._arrived, self._answered, self._exceeded = now, 0, 0, False
        self._computed_seconds *= MEMORY
        self._seconds *= MEMORY
        return begins

    def _begin(self, now: float) -> None:
        if now >= self._probation_ends:
            self._interval_seconds = FIRST_PROBE_SECONDS
        self.limit = self._lowest()
        self._probe_at = now + self._interval_seconds
        OVERLOADED.add(weakref.ref(self, OVERLOADED.discard))

    def _end(self, now: float, in_flight: int) -> None:
        self.limit = math.inf
        self._grown = 0
        self._probation_ends = now + PROBATION_SECONDS
        self._sustained = PROBATION_GROWTH * in_flight + PROBATION_GRACE
        self._interval_seconds = min(MAX_PROBE_INTERVAL_SECONDS, 2 * self._interval_seconds)
        OVERLOADED.discard(weakref.ref(self))

    def _lowest(self) -> float:
        """So few in flight that no instance is ever without work, and no more."""
        at_a_time = self._computed_seconds / self._seconds if self._seconds else 0.0
        return math.floor(IN_FLIGHT * max(self._instances, at_a_time))


#: The controllers of models that are overloaded now: while there are none the fronts need not ask
#: whose request has come. The event loop alone changes it. Every request looks at it, and to ask a
#: ``WeakSet`` for its truth is a call.
OVERLOADED: set[weakref.ref[OverloadController]] = set()
