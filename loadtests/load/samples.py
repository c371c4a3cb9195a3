"""Samples of a run: every request's raw times, and the load that produced them.

Locust rounds its own response times; nothing is rounded here before the HDR histogram, whose
relative error is below 0.1 % (three significant figures).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from modelport.loadtests.load.target import LoadTestTarget


class Outcome(IntEnum):
    """The outcome of a request."""

    OK = 0
    #: Answered in time, with another answer than expected.
    WRONG = 1
    #: Shed by the server: HTTP 429 or 503, gRPC RESOURCE_EXHAUSTED or UNAVAILABLE.
    REFUSED = 2
    FAILED = 3
    TIMED_OUT = 4


#: Seconds since the run's start. ``intended``: the time of sending by the load's shape; in a
#: closed loop the same as ``sent``. Latency is ``done - intended``, time to first byte
#: ``first_byte - sent``.
SAMPLE = np.dtype(
    [
        ("intended", "<f8"),
        ("sent", "<f8"),
        ("first_byte", "<f8"),
        ("done", "<f8"),
        ("outcome", "u1"),
    ]
)
Samples = npt.NDArray[np.void]

#: Share of a core from which the load generator counts as saturated.
SATURATED_SHARE = 0.9
#: Rounding error of clock readings, which grows with the clock's value.
CLOCK_SECONDS = 1e-6


@dataclass(frozen=True)
class LoadProfile:
    """The load on a target and its duration; a closed loop without a ``rate``."""

    #: constant, ramp, spike or soak.
    shape: str = "constant"
    #: Most requests in flight; in a closed loop always this many.
    users: int = 1
    #: Intended requests per second of an open loop; the end of a ramp, the top of a spike.
    rate: float | None = None
    duration_seconds: float = 10.0
    #: Requests in this time are not counted.
    warmup_seconds: float = 1.0
    #: Rows in a request.
    batch_size: int = 1
    seed: int = 0
    timeout_seconds: float = 30.0

    @property
    def counted_from_seconds(self) -> float:
        """Start of counting, from the load's start; requests due earlier belong to the warm-up."""
        return self.warmup_seconds - CLOCK_SECONDS

    @property
    def has_single_user(self) -> bool:
        """Whether a single user sends all the time, so that no other user has to run meanwhile."""
        return self.users == 1 and self.rate is None


@dataclass(frozen=True)
class LoadRun:
    """One load on one target, and its samples."""

    target: LoadTestTarget
    load: LoadProfile
    #: [requests] of ``SAMPLE``, after the warm-up.
    samples: Samples
    #: Counts by error message.
    errors: Mapping[str, int] = field(default_factory=dict)
    #: CPU time of the load generator in the whole run.
    client_cpu_seconds: float = 0.0
    #: Share of a core used by the generator's busiest process; near 1 the generator was the limit.
    client_cpu_share: float = 0.0
    #: ISO 8601, UTC.
    began_at: str = ""
    #: False if the run was stopped early or the generator failed; ``samples`` has the rest.
    complete: bool = True
    #: The reason that it is incomplete.
    failure: str = ""

    @property
    def saturated(self) -> bool:
        """Whether the load generator was at its limit, so that the figures describe the
        generator."""
        return self.client_cpu_share > SATURATED_SHARE
