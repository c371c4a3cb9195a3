"""Checks: one question with its answer, in an SLO, a gate or a JUnit file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class CheckStatus(StrEnum):
    """Status names, for the exit codes 0, 1 and 3."""

    PASS = "pass"
    FAIL = "fail"
    #: The measurement does not decide it.
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Check:
    """A check: what was observed and what was allowed, as text for people."""

    name: str
    status: CheckStatus
    #: "12.3 ms".
    observed: str
    #: "at most 15.0 ms".
    bound: str = ""
    detail: str = ""
    seconds: float = 0.0


def worst(checks: Iterable[Check]) -> CheckStatus:
    """The overall status: one failure fails; otherwise one open question leaves it open."""
    found = {check.status for check in checks}
    for status in (CheckStatus.FAIL, CheckStatus.INCONCLUSIVE):
        if status in found:
            return status
    return CheckStatus.PASS
