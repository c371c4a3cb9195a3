"""Retries on a second endpoint: the failures that allow one, and how many there may be.

When a server dies, every request in flight may need a retry, so there is a reserve; each request
refills it by a tenth of a retry. Over a thousand requests that is at most 1.2 attempts each. The
endpoint pool sends them (``pool.EndpointPool.call``).
"""

from __future__ import annotations

from modelport.gateway.upstream.outlier_detection import FailureKind

#: The endpoint has not begun to compute, so any request can be sent elsewhere.
NOT_PROCESSED = frozenset(
    FailureKind[name] for name in ("REFUSED", "SILENT", "UNREADY", "MISSING", "FULL")
)
#: An inference has no side effects, so it can be sent elsewhere after any failure.
IDEMPOTENT = frozenset(FailureKind)
#: A stream may have had an effect before it failed, so fewer failures are retried.
STREAM_RETRIED = NOT_PROCESSED | {FailureKind.DROPPED}
RESERVED_RETRIES = 100.0
EARNED_PER_REQUEST = 0.1


class RetryBudget:
    """The retries that are left; starts with the whole reserve."""

    def __init__(self) -> None:
        self._retries = RESERVED_RETRIES

    def earn(self) -> None:
        """Count a request."""
        self._retries = min(RESERVED_RETRIES, self._retries + EARNED_PER_REQUEST)

    def spend(self) -> bool:
        """Take one retry; whether there was one."""
        allowed = self._retries >= 1.0
        self._retries -= allowed
        return allowed
