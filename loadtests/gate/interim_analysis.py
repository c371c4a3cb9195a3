"""Interim analyses: the times at which the gate looks at its growing data, and may stop."""

from __future__ import annotations

from collections.abc import Sequence

from modelport.gateway.slo import Slo
from modelport.loadtests.checks import CheckStatus, worst
from modelport.loadtests.gate.criteria import PairedRound
from modelport.loadtests.gate.decision import LOOKS, Question, decide


class Looks:
    """The looks of one gate.

    Their times, as fractions of the longest duration, are fixed before measuring; ``decide``
    accounts for the chance to stop at each of them.
    """

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        #: The looks taken so far, as fractions of the longest duration.
        self._taken: tuple[float, ...] = ()
        self.questions: tuple[Question, ...] = ()
        self.status = CheckStatus.INCONCLUSIVE

    def at(self, rounds: Sequence[PairedRound], fraction: float) -> bool:
        """Look if a look is due; return whether the gate may stop.

        Args:
            fraction: the elapsed fraction of the longest duration; 1: no further round fits.
        """
        last = self._taken[-1] if self._taken else 0.0
        due = [look for look in LOOKS if last < look <= fraction + 1e-9]
        if not due:
            return False
        self._taken += (max(due),)
        self.questions = decide(rounds, self._slo, self._taken)
        self.status = worst(question.check for question in self.questions)
        return self.status is not CheckStatus.INCONCLUSIVE or self._taken[-1] >= 1.0
