"""The retry budget of a route: how many requests may be sent to a second endpoint.

When a server dies, every request in flight may need a retry, so there is a reserve; each request
refills it by a tenth of a retry. Over a thousand requests that is at most 1.2 attempts each.
"""

from __future__ import annotations

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
