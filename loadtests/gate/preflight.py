"""Preflight of a gate: both sides run once before the rounds, and their answers are compared.

Candidate and baseline with the same checkpoint must answer alike, in any format or precision: the
baseline's answers are the expected ones. With different checkpoints each side is compared with its
own, whose answers its version carries (``samples.json``). Their difference is reported; if the true
labels are known, the loss of accuracy is limited.

Afterwards the files are in the page cache, so neither side's first start has a disadvantage.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modelport.gateway.errors import UsageError
from modelport.gateway.repository.version_proof import is_retrained, proof_in
from modelport.loadtests import confidence_intervals, model_quality
from modelport.loadtests.checks import CheckStatus
from modelport.loadtests.gate import agreement, baseline_and_candidate, integrity, reference_answers
from modelport.loadtests.gate.agreement import AnswerAgreement
from modelport.loadtests.gate.baseline_and_candidate import Published
from modelport.loadtests.gate.criteria import WRONG
from modelport.loadtests.gate.decision import SHARES_PART, Question
from modelport.loadtests.gate.paired_rounds import LiveSide, PairedMeasurement, SideFailed
from modelport.loadtests.load import payloads
from modelport.loadtests.load.payloads import Payloads
from modelport.loadtests.users.answer_collection import CollectedAnswer, given
from modelport.loadtests.users.client import Unanswered
from modelport.loadtests.users.signature import RequestSignature, SignatureUnknown

#: Part of the longest duration for requests to each side before the rounds.
ASKING_PART = 0.2
NAMES = ("baseline", "candidate")


@dataclass(frozen=True)
class PreflightResult:
    """The results of the preflight; a failed question ends the gate."""

    questions: tuple[Question, ...]
    agreement: AnswerAgreement | None = None
    notes: tuple[str, ...] = ()


class _Wrong(Exception):
    """The candidate's answers are wrong; ``question`` has the details."""

    def __init__(self, question: Question) -> None:
        super().__init__(question.detail)
        self.question = question


class Preflight:
    """The preflight of one gate.

    Args:
        data: recorded requests; None: random ones within the model's ranges.
    """

    def __init__(self, pair: PairedMeasurement, data: Path | None) -> None:
        self._pair, self._data, self._slo = pair, data, pair.slo
        self._certificates = [
            integrity.read(one) if isinstance(one, Published) else {} for one in pair.sides
        ]
        self._proofs = [proof_in(one) for one in self._certificates]
        told = self._slo.answers.retrained
        self._retrained = is_retrained(*self._proofs) if told is None else told
        self._recordings = [
            integrity.recording(one) if isinstance(one, Published) else None for one in pair.sides
        ]
        self._notes: list[str] = []

    def run(self) -> PreflightResult:
        """Start both sides, record or check the expected answers, and give them to the pair.

        Raises:
            SideFailed: a side cannot be measured.
            UsageError: something cannot be compared.
        """
        signatures = self._signatures()
        if problem := baseline_and_candidate.interface_problem(*signatures):
            return PreflightResult((Question("interface", "", CheckStatus.FAIL, detail=problem),))
        asked = self._requests(signatures[0])
        try:
            before = self._asked(0, asked)
            asked = reference_answers.first(asked, len(before))
            right = self._right(asked, before)
            after = self._asked(1, right[1])
        except _Wrong as error:
            if self._pair.expects_own_answers and not self._retrained:
                self._confirm(right[0])
            return PreflightResult((error.question,), notes=tuple(self._notes))
        right = [reference_answers.first(one, len(after)) for one in right]
        if right[1].expected is None:
            right[1] = reference_answers.own(right[1], after, self._recordings[1])
        self._leave(right)
        found = self._agreement(signatures[0], asked, before, after)
        questions = [self._proven(1)] if self._recordings[1] is not None else []
        questions += self._quality(found, len(after) < self._rows)
        return PreflightResult(tuple(questions), found, tuple(self._notes))

    # -- the requests ------------------------------------------------------------------------------

    def _signatures(self) -> list[RequestSignature]:
        found = []
        for side in self._pair.sides:
            try:
                found.append(side.signature())
            except SignatureUnknown as error:
                raise baseline_and_candidate.unknown(side, error) from error
        return found

    def _requests(self, signature: RequestSignature) -> Payloads:
        """The requests; raise ``UsageError`` if there are none, or no expected answers."""
        load = self._slo.load
        asked = reference_answers.requests(signature, self._data, load.batch_size, self._pair.seed)
        self._rows = len(asked.requests)
        if self._slo.wants_labels and asked.labels is None:
            raise UsageError(f"max_drop needs '{payloads.LABELS}' in --data, an .npz of rows")
        if not self._retrained:
            return asked
        candidate = self._pair.sides[1]
        lacks = isinstance(candidate, Published) and self._recordings[1] is None
        if lacks and asked.expected is None:
            raise UsageError(
                f"the candidate '{candidate.given}' was retrained and has no recorded answers of "
                f"its checkpoint; 'modelport sample {candidate.given}' records them"
            )
        return asked if self._data else reference_answers.with_recorded(asked, self._recordings)

    def _right(self, asked: Payloads, before: Sequence[CollectedAnswer]) -> list[Payloads]:
        """The requests of each side with their expected answers; None yet: its own answers."""
        pair, wanted = self._pair, self._slo.answers
        mine = [reference_answers.tolerance(asked, wanted, [proof]) for proof in self._proofs]
        if self._retrained:
            pair.expects_own_answers = True
            learnt = dataclasses.replace(mine[0], expected=None)
            return [reference_answers.own(learnt, before, self._recordings[0]), mine[1]]
        if asked.expected is None:
            pair.expects_own_answers = True
            published = [
                proof
                for proof, side in zip(self._proofs, pair.sides, strict=True)
                if isinstance(side, Published)
            ]
            both = reference_answers.tolerance(asked, wanted, published)
            expected = tuple(one.tensors for one in before)
            mine = [dataclasses.replace(both, expected=expected)] * 2
        return mine

    # -- the sides ---------------------------------------------------------------------------------

    def _asked(self, which: int, asked: Payloads) -> list[CollectedAnswer]:
        """Collect a side's answers, after checking those of its own checkpoint.

        Raises:
            SideFailed: the side cannot be measured, or the baseline answers wrongly.
            _Wrong: the candidate answers wrongly.
        """
        self._pair.say(f"preflight: {NAMES[which]}")
        with self._pair.live(which) as live:
            recording = self._recordings[which]
            if recording is not None:
                allowed = dataclasses.replace(
                    recording,
                    absolute_tolerance=_said(self._slo.answers.atol, recording.absolute_tolerance),
                    relative_tolerance=_said(self._slo.answers.rtol, recording.relative_tolerance),
                )
                found = self._given(which, live, allowed)
                self._hold(which, live, allowed, found, "the answers of its own checkpoint")
            found = self._given(which, live, asked)
            if which == 1 and asked.expected is not None:
                whose = (
                    "--data's"
                    if self._data and not self._pair.expects_own_answers
                    else "the baseline's"
                )
                whose = "--data's" if self._retrained else whose
                self._hold(which, live, asked, found, f"as {whose}")
        return found

    def _confirm(self, right: Payloads) -> None:
        """Raise ``SideFailed`` if the baseline does not repeat its own answers."""
        self._pair.say("preflight: baseline, second start")
        with self._pair.live(0) as live:
            count, first = reference_answers.wrong(right, self._given(0, live, right), live.target)
        if count:
            raise SideFailed(
                f"the baseline changed its answers to {count} of {len(right.requests)} requests, "
                f"such as {first}; give expected answers with --data, or a larger tolerance in "
                "[answers]",
                is_candidate=False,
            )

    def _given(self, which: int, live: LiveSide, asked: Payloads) -> list[CollectedAnswer]:
        part = ASKING_PART * self._slo.duration.max_seconds
        until = time.monotonic() + min(part, self._pair.left)
        try:
            return given(asked, live.target, until)
        except Unanswered as error:
            why = f"the {NAMES[which]} does not respond: {error}"
            raise SideFailed(why, is_candidate=which == 1) from error

    def _hold(
        self,
        which: int,
        live: LiveSide,
        asked: Payloads,
        found: Sequence[CollectedAnswer],
        how: str,
    ) -> None:
        """End the gate if too many answers are wrong; a few are left to the rounds."""
        allowed = self._slo.limits.max_wrong_share
        count, first = reference_answers.wrong(asked, found, live.target)
        if allowed is None or not count:
            return
        error = SHARES_PART * (1 - self._slo.verdict.confidence)
        share = confidence_intervals.share([count], [len(found)], 1 - error)
        if share.lower <= allowed:
            return
        detail = f"{count} of {len(found)} answers are not {how}, such as {first}"
        if which == 0:
            raise SideFailed(f"the baseline answers wrongly: {detail}", is_candidate=False)
        if not self._retrained and how == "as the baseline's" and not all(self._certificates):
            detail += "; if it was retrained, add --retrained"
        raise _Wrong(
            Question(
                WRONG,
                "share",
                CheckStatus.FAIL,
                candidate=share.estimate,
                change=share.estimate,
                low=share.lower,
                high=share.upper,
                allowed=allowed,
                detail=detail,
            )
        )

    def _leave(self, right: Sequence[Payloads]) -> None:
        """Give both sides' requests and expected answers to the pair."""
        first, second = (self._pair.work / f"{name}.json" for name in NAMES)
        for path, one in zip((first, second), right, strict=True):
            payloads.write(one, path)
        self._pair.payloads = (first, second)
        allowed = f"{right[1].absolute_tolerance:g} + {right[1].relative_tolerance:g} x |expected|"
        if not self._retrained:
            whose = "the baseline's" if self._pair.expects_own_answers else "those of --data"
            self._notes.append(f"Correct answers were {whose}, to within {allowed}.")
            return
        self._notes.append(
            "The candidate was retrained: each side was compared with its own checkpoint's "
            f"answers, and elsewhere with its own first ones, the candidate to within {allowed}."
        )
        if self._recordings[0] is None:
            given = self._pair.sides[0].given
            self._notes.append(
                "The baseline has no recorded answers of its checkpoint and was compared with its "
                f"own first ones; 'modelport sample {given}' records them."
            )

    # -- the report --------------------------------------------------------------------------------

    def _proven(self, which: int) -> Question:
        recording = self._recordings[which]
        assert recording is not None
        detail = f"{len(recording.requests)} recorded requests"
        return Question("answers of its own checkpoint", "", CheckStatus.PASS, detail=detail)

    def _agreement(
        self,
        signature: RequestSignature,
        asked: Payloads,
        before: Sequence[CollectedAnswer],
        after: Sequence[CollectedAnswer],
    ) -> AnswerAgreement | None:
        """The agreement of both sides; None with one checkpoint and without labels."""
        if not self._retrained and asked.labels is None:
            return None
        decided = model_quality.deciding(self._proofs, signature, asked.labels is not None)
        count = len(after)
        try:
            return agreement.compared(
                [one.tensors for one in before[:count]],
                [one.tensors for one in after],
                decided,
                None if asked.labels is None else asked.labels[:count],
                self._slo.verdict.confidence,
            )
        except ValueError as error:
            raise UsageError(f"--data '{self._data}': {error}") from error

    def _quality(self, found: AnswerAgreement | None, is_part: bool) -> list[Question]:
        """The limit on accuracy or AUC, on the rows of --data."""
        allowed = self._slo.regressions.max_drop
        if found is None or found.drop is None or allowed is None:
            return []
        status = CheckStatus.PASS if found.drop <= allowed else CheckStatus.FAIL
        detail = f"lost on {found.decisions:,} rows of {Path(str(self._data)).name}"
        if is_part:
            status = CheckStatus.INCONCLUSIVE
            detail += f", without the other {self._rows - found.requests:,}, for lack of time"
        return [
            Question(
                f"{found.metric}, against the baseline",
                "",
                status,
                baseline=found.baseline,
                candidate=found.candidate,
                change=found.drop,
                low=found.low,
                high=found.high,
                allowed=allowed,
                detail=detail,
                longer=2.0 if is_part else 1.0,
            )
        ]


def _said(wanted: float | None, default: float) -> float:
    return default if wanted is None else wanted
