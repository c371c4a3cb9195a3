"""When the gate looks at its growing data, and what of the error each look may spend."""

from __future__ import annotations

from collections.abc import Sequence

from modelport.loadtests.gate.criteria import Round
from modelport.loadtests.gate.decision import LOOKS, Question, decide
from modelport.loadtests.gate.slo import Slo
from modelport.loadtests.report.checks import Status, worst


class Looks:
    """The looks of one gate.

    The parts of the longest duration at which it looks are fixed before anything is measured; that
    it may stop at each of them is paid for in ``decide``.
    """

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        #: Those that were taken, as parts of the longest duration.
        self._taken: tuple[float, ...] = ()
        self.questions: tuple[Question, ...] = ()
        self.status = Status.INCONCLUSIVE

    def at(self, rounds: Sequence[Round], fraction: float) -> bool:
        """Look, if a look is due; true when the gate may stop.

        Args:
            fraction: the part of the longest duration that has passed; 1: no further round fits.
        """
        last = self._taken[-1] if self._taken else 0.0
        due = [look for look in LOOKS if last < look <= fraction + 1e-9]
        if not due:
            return False
        self._taken += (max(due),)
        self.questions = decide(rounds, self._slo, self._taken)
        self.status = worst(question.check for question in self.questions)
        return self.status is not Status.INCONCLUSIVE or self._taken[-1] >= 1.0
