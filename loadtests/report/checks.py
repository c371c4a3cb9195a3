"""One question with its answer: a line of an SLO, of the gate, of a JUnit file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class CheckStatus(StrEnum):
    """The words of exit codes 0, 1 and 3."""

    PASS = "pass"
    FAIL = "fail"
    #: Neither: the measurement does not decide it.
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Check:
    """What was asked, what was allowed, and what was seen; texts are for people."""

    name: str
    status: CheckStatus
    #: "12.3 ms".
    observed: str
    #: "at most 15.0 ms".
    bound: str = ""
    detail: str = ""
    seconds: float = 0.0


def worst(checks: Iterable[Check]) -> CheckStatus:
    """One failure fails; without one, one open question leaves all of it open."""
    found = {check.status for check in checks}
    for status in (CheckStatus.FAIL, CheckStatus.INCONCLUSIVE):
        if status in found:
            return status
    return CheckStatus.PASS
