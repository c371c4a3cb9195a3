"""What a run leaves: every request's times, raw, and the percentiles taken from them.

Locust rounds its own response times; nothing here is rounded before the HDR histogram, whose
relative error is below 0.1 % (three significant figures).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from modelport.loadtests.target import LoadTestTarget


class Outcome(IntEnum):
    """What became of a request."""

    OK = 0
    #: Answered in time, with another answer than expected.
    WRONG = 1
    #: Shed by the server: HTTP 429 or 503, gRPC RESOURCE_EXHAUSTED or UNAVAILABLE.
    REFUSED = 2
    FAILED = 3
    TIMED_OUT = 4


#: Seconds since the run's beginning. ``intended``: when the load's shape wanted it sent; in a
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

#: Of a core.
SATURATED_SHARE = 0.9
#: Moments are differences of a clock's readings, which round the more the longer it has run.
CLOCK_SECONDS = 1e-6


@dataclass(frozen=True)
class LoadProfile:
    """How a target is asked, for how long. Without a ``rate`` it is a closed loop."""

    #: constant, ramp, spike or soak.
    shape: str = "constant"
    #: Requests in flight at most; of a closed loop: always.
    users: int = 1
    #: Intended requests a second, open loop; a ramp's end, a spike's top.
    rate: float | None = None
    duration_seconds: float = 10.0
    #: Asked and answered before that, and not counted.
    warmup_seconds: float = 1.0
    #: Rows in a request.
    batch_size: int = 1
    seed: int = 0
    timeout_seconds: float = 30.0

    @property
    def counted_from_seconds(self) -> float:
        """Of the beginning: what was due earlier is the warm-up's."""
        return self.warmup_seconds - CLOCK_SECONDS

    @property
    def is_lone(self) -> bool:
        """One user that always asks: it needs nobody to run beside it, and can ask many in turn."""
        return self.users == 1 and self.rate is None


@dataclass(frozen=True)
class LoadRun:
    """One load on one target."""

    target: LoadTestTarget
    load: LoadProfile
    #: [requests] of ``SAMPLE``, those after the warm-up.
    samples: Samples
    #: Error messages, with how often each came.
    errors: Mapping[str, int] = field(default_factory=dict)
    #: Of the load generator, for all of the run.
    client_cpu_seconds: float = 0.0
    #: Of one core, of its busiest process: near 1 it was the generator that could do no more.
    client_cpu_share: float = 0.0
    #: ISO 8601, UTC.
    began_at: str = ""
    #: False: stopped before its end, or the generator failed; ``samples`` is what came until then.
    complete: bool = True
    #: Why it is not complete.
    failure: str = ""

    @property
    def saturated(self) -> bool:
        """Whether the load generator itself was at its limit, and its figures are about it."""
        return self.client_cpu_share > SATURATED_SHARE
