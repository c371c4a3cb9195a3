"""A run of a comparison: every candidate once in every round, in a rotating order."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from modelport.gateway.runtime.progress import Show
from modelport.loadtests.compare import rounds
from modelport.loadtests.compare.measured_candidate import MeasuredCandidate
from modelport.loadtests.compare.result import Absent, Comparison
from modelport.loadtests.compare.rounds import CandidateRound, Measure, RoundSettings
from modelport.loadtests.compare.verdict_matrix import matrix
from modelport.loadtests.load.run import measure as measure_with_locust
from modelport.loadtests.serving import torchserve
from modelport.loadtests.system.hardware import hardware


@dataclass(frozen=True)
class ComparisonSubject:
    """The description of a comparison in its report."""

    model: str
    source: str
    command: str = ""
    price_per_hour: float | None = None
    currency: str = ""


@dataclass
class ComparisonRun:
    """Candidates, and their rounds.

    Attributes:
        work: an empty folder for the servers' files.
        ends_at: a time of ``time.monotonic()``; a round that would exceed it is not started.
    """

    subject: ComparisonSubject
    contenders: Sequence[MeasuredCandidate]
    absent: Sequence[Absent]
    settings: RoundSettings
    rounds: int
    work: Path
    ends_at: float
    began: float = field(default_factory=time.monotonic)
    began_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    measure: Measure = measure_with_locust
    notes: list[str] = field(default_factory=list)
    rounds_done: int = 0

    def run(self, tell: Show) -> None:
        """Measure. After an interruption the contenders hold the results so far."""
        per_candidate = self.settings.loads + 1
        total = len(self.contenders) * (1 + self.rounds * per_candidate)
        done = 0
        for contender in self.contenders:
            tell(f"checking the answers of {contender.name}", done, total)
            rounds.verify(contender, self.settings, self._folder())
            done += 1
        for number in range(self.rounds):
            began = time.monotonic()
            for contender in self._order(number):
                if contender.disqualified is None:
                    self._one(contender, number, tell, itertools.count(done), total)
                done += per_candidate
            self.rounds_done = number + 1
            took = time.monotonic() - began
            if number + 1 < self.rounds and time.monotonic() + took > self.ends_at:
                self._note(
                    f"{number + 1} of {self.rounds} rounds: another would exceed the time limit"
                )
                break

    def _one(
        self,
        contender: MeasuredCandidate,
        number: int,
        tell: Show,
        steps: Iterator[int],
        total: int,
    ) -> None:
        def show(what: str) -> None:
            where = f"round {number + 1} of {self.rounds} · {contender.name}"
            tell(f"{where} · {what}", next(steps), total)

        for note in CandidateRound(contender, number, self.settings, self.measure, show).run(
            self._folder()
        ):
            self._note(note)

    def _order(self, number: int) -> Sequence[MeasuredCandidate]:
        """The order of a round, rotated so that no candidate always follows the same one or is
        last."""
        shift = number % max(1, len(self.contenders))
        return [*self.contenders[shift:], *self.contenders[:shift]]

    def _folder(self) -> Path:
        """A new empty folder for each start of a server."""
        folder = self.work / "server"
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def result(self, *more: str) -> Comparison:
        """The results so far, with further notes."""
        candidates = tuple(c.candidate(self.subject.price_per_hour) for c in self.contenders)
        servers = {contender.entry.backend for contender in self.contenders}
        versions = [("torchserve", torchserve.VERSION)] if "torchserve" in servers else []
        found = Comparison(
            model=self.subject.model,
            source=self.subject.source,
            began_at=self.began_at,
            seconds=time.monotonic() - self.began,
            hardware=hardware(versions),
            slo_p99_ms=self.settings.slo_p99_ms,
            rounds=self.rounds_done,
            candidates=candidates,
            absent=tuple(self.absent),
            matrix=matrix(candidates, self.settings.slo_p99_ms),
            command=self.subject.command,
            price_per_hour=self.subject.price_per_hour,
            currency=self.subject.currency,
            seed=self.settings.seed,
        )
        return replace(found, notes=(*self._remarks(), *self.notes, *more))

    def _remarks(self) -> list[str]:
        settings = self.settings
        told = []
        if settings.client_core is not None:
            told.append(
                f"servers on core {', '.join(map(str, settings.server_cores))}, load generator on "
                f"core {settings.client_core}"
            )
        else:
            told.append("one core: servers and load generator share it")
        asked = {c.name: c.runs[0].protocol for c in self.contenders if c.runs}
        for name, protocol in asked.items():
            if protocol != settings.protocols[0]:
                told.append(
                    f"{name} gets requests in {protocol}: it does not support "
                    f"{settings.protocols[0]}"
                )
        told += [
            f"{c.name} is disqualified: {c.disqualified}" for c in self.contenders if c.disqualified
        ]
        return told
