"""The overload controller of a model: a pure decision when to refuse requests, and when to stop.

The length of a queue does not show an overload. Closed-loop clients, which each wait for a response
before the next request, make a queue as long as they are many, and it stays that long. Only
open-loop arrivals let it grow without limit. So an overload *begins* when arrivals exceed responses
for several slots of time in a row. Then few requests may be in flight, and more are refused at
once.

Arrivals do not show that an overload has *ended*: a refused client that retries at once arrives a
thousand times a second, although it would be one request in flight if it were admitted. So from
time to time a *probe* refuses no request for some milliseconds, but *holds* it. Closed-loop clients
are soon all held; then no more requests arrive than are answered, the overload has ended, and the
held requests are admitted. If more keep arriving, it has not, and the held requests are refused.

An overload also ends in silence: the guard looks at the controller although no request arrives.
"""

from __future__ import annotations

import math
import weakref
from enum import Enum

#: A slot has at least this duration and this many arrivals, but never exceeds the maximum.
SLOT_SECONDS = 0.05
SLOT_ARRIVALS = 16
MAX_SLOT_SECONDS = 1.0
#: A slot has grown if arrivals exceed ``GROWTH`` times the responses by more than ``GRACE``.
GROWTH = 1.25
GRACE = 4
#: This many grown slots in a row are an overload.
GROWN_SLOTS = 4
#: Requests in flight per request being computed during an overload: as many wait as run.
IN_FLIGHT = 2.2
#: The weight of earlier slots in the mean number of requests being computed.
MEMORY = 0.8
#: A probe; the arrivals of its second half decide.
PROBE_SECONDS = 0.04
MAX_HELD = 4096
#: The delay of the first probe of an overload; it doubles with each probe that fails.
FIRST_PROBE_SECONDS = 0.25
MAX_PROBE_INTERVAL_SECONDS = 1.0
#: For this time after an overload, a new one begins as soon as arrivals exceed the probe's.
PROBATION_SECONDS = 2.0
PROBATION_GROWTH, PROBATION_GRACE = 2, 8


class AdmissionDecision(Enum):
    """The decision about a request that has arrived."""

    ADMIT = "admit"
    HOLD = "hold"
    REFUSE = "refuse"


#: References to the controllers that are overloaded now.
OverloadedModels = set["weakref.ref[OverloadController]"]


class OverloadController:
    """Counts requests, and limits those in flight during an overload.

    Args:
        instances: the least number of requests that run at a time.
        least: never an overload with this many requests in flight.
        overloaded: contains this controller during an overload. Listeners ask whether to refuse an
            unread request only if any model is in it. The event loop alone changes it. Every
        request tests it, so it is a plain set: the truth of a ``WeakSet`` costs a call.
    """

    def __init__(
        self, instances: int, least: int, overloaded: OverloadedModels | None = None
    ) -> None:
        self._instances = instances
        self._least = least
        self._overloaded: OverloadedModels = set() if overloaded is None else overloaded
        #: The most requests in flight; infinite without an overload.
        self.limit = math.inf
        #: Requests that wait for the end of a probe.
        self.held = 0
        # The current slot, and the number of grown slots in a row before it.
        self._started = 0.0
        self._arrived = self._answered = 0
        self._grown = 0
        #: More requests arrived in this slot than may be in flight.
        self._exceeded = False
        # Decayed sums: the compute time of responses, and the time in which they were computed.
        self._computed_seconds = self._seconds = 0.0
        # The start of the current probe if above 0; else the time of the next one.
        self._probe_began = self._probe_at = 0.0
        self._interval_seconds = FIRST_PROBE_SECONDS
        self._late_arrived = self._late_answered = 0
        # Until this time, more than ``_sustained`` requests in flight are an overload.
        self._probation_ends = 0.0
        self._sustained = 0

    @property
    def overloaded(self) -> bool:
        return self.limit != math.inf

    @property
    def probing(self) -> bool:
        return self._probe_began > 0

    def _probe_is_due(self, now: float) -> bool:
        """Whether a probe runs, or the next request begins one."""
        return self.probing or now >= self._probe_at

    def refuses_unread(self, now: float, before: int) -> bool:
        """Whether a request is refused before it is read; if so, it is counted."""
        if before < self.limit or self._probe_is_due(now):
            return False
        self._exceeded = True
        self.arrived(now, before)
        return before >= self.limit

    def arrived(self, now: float, in_flight: int) -> bool:
        """Count an arrival, refused or not. Whether an overload begins with it."""
        self._arrived += 1
        elapsed = now - self._started
        if elapsed < SLOT_SECONDS:
            return False
        if elapsed > MAX_SLOT_SECONDS:  # so few arrivals are not an overload
            self._answered = max(self._answered, self._arrived)
        elif self._arrived < SLOT_ARRIVALS:
            return False
        return self._turn(now, elapsed, in_flight)

    def look(self, now: float, in_flight: int) -> bool:
        """Close a slot that no arrival has closed; whether the overload has ended."""
        if now - self._started > MAX_SLOT_SECONDS:
            self._answered = max(self._answered, self._arrived)
            self._turn(now, now - self._started, in_flight)
        return not self.overloaded

    def judge(self, now: float, before: int) -> AdmissionDecision:
        """Decide about a request that has arrived behind ``before`` others."""
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
            if self._arrivals_exceed_responses():
                return AdmissionDecision.REFUSE
        return AdmissionDecision.HOLD if self.held < MAX_HELD else AdmissionDecision.REFUSE

    def failed_probe(self) -> bool:
        """Whether the current probe has failed already."""
        return self.probing and (self._arrivals_exceed_responses() or self.held >= MAX_HELD)

    def end_probe(self, now: float, in_flight: int) -> bool:
        """Whether the overload has ended, so that held requests are admitted."""
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

    def _arrivals_exceed_responses(self) -> bool:
        return self._late_arrived > GROWTH * self._late_answered + GRACE

    def _turn(self, now: float, elapsed: float, in_flight: int) -> bool:
        """Close a slot; whether an overload begins."""
        grown = self._arrived > GROWTH * self._answered + GRACE
        self._grown = self._grown + 1 if grown else 0
        self._seconds += elapsed
        begins = False
        if self.overloaded:
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
        self._overloaded.add(weakref.ref(self, self._overloaded.discard))

    def _end(self, now: float, in_flight: int) -> None:
        self.limit = math.inf
        self._grown = 0
        self._probation_ends = now + PROBATION_SECONDS
        self._sustained = PROBATION_GROWTH * in_flight + PROBATION_GRACE
        self._interval_seconds = min(MAX_PROBE_INTERVAL_SECONDS, 2 * self._interval_seconds)
        self._overloaded.discard(weakref.ref(self))

    def _lowest(self) -> float:
        """The fewest requests in flight that keep every instance busy."""
        at_a_time = self._computed_seconds / self._seconds if self._seconds else 0.0
        return math.floor(IN_FLIGHT * max(self._instances, at_a_time))
