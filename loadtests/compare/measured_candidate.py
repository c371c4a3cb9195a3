"""A candidate under measurement: its server, its expected answers, and the results so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from modelport.loadtests import model_quality as quality
from modelport.loadtests.compare.artifacts import ComparedArtifact
from modelport.loadtests.compare.plan import Entry
from modelport.loadtests.compare.result import Candidate, Measured
from modelport.loadtests.load.payloads import Payloads
from modelport.loadtests.model_quality import Deciding, Quality
from modelport.loadtests.serving.answer_check import AnswerCheck
from modelport.loadtests.serving.server import ReadyServer, ServedBackend
from modelport.loadtests.users import answer_collection
from modelport.loadtests.users.client import Unanswered

SECONDS_IN_HOUR = 3600.0
MILLION = 1e6
#: Confidence of the interval of accuracy or AUC.
CONFIDENCE = 0.95


@dataclass
class MeasuredCandidate:
    """One format on one backend.

    Attributes:
        requests: the file of ``payloads``: the same seeded inputs for every candidate, with the
            answers of the checkpoint (fp32) or of the proven artifact (below fp32).
        labelled: rows with known labels, and the decision; None: there are none.
    """

    name: str
    entry: Entry
    artifact: ComparedArtifact
    backend: ServedBackend
    requests: Path
    payloads: Payloads
    labelled: tuple[Payloads, Deciding] | None = None
    quality: Quality | None = None
    cold_start_seconds: list[float] = field(default_factory=list)
    cold_first_response_seconds: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    runs: list[Measured] = field(default_factory=list)
    rate_under_slo: list[float | None] = field(default_factory=list)
    cpu_seconds_per_request: list[float] = field(default_factory=list)
    disqualified: str | None = None

    def disqualify(self, why: str) -> None:
        """Record a reason for disqualification; only the first one counts."""
        self.disqualified = self.disqualified or " ".join(why.split())[:400]

    def candidate(self, price_per_hour: float | None) -> Candidate:
        """The results so far."""
        proven, measured = self.artifact.certificate, self.quality
        return Candidate(
            name=self.name,
            format=self.artifact.variant.format,
            precision=self.artifact.variant.precision,
            backend=self.entry.backend,
            direct=self.entry.direct,
            artifact_bytes=proven.size_bytes,
            max_abs_error=proven.max_abs_error,
            agreement=proven.agreement,
            decisions=proven.decisions,
            speedup=proven.speedup,
            speedup_rows=proven.speedup_rows,
            metric_name=measured.metric if measured else proven.metric_name,
            metric=measured.value if measured else proven.metric,
            metric_interval=(measured.low, measured.high) if measured else None,
            cold_start_seconds=tuple(self.cold_start_seconds),
            cold_first_response_seconds=tuple(self.cold_first_response_seconds),
            memory_bytes=tuple(self.memory_bytes),
            runs=tuple(self.runs),
            rate_under_slo=tuple(self.rate_under_slo),
            cpu_seconds_per_request=tuple(self.cpu_seconds_per_request),
            cost_per_million=cost_per_million(self.rate_under_slo, price_per_hour),
            disqualified=self.disqualified,
        )


def cost_per_million(rates: Sequence[float | None], price_per_hour: float | None) -> float | None:
    """Cost of a million inferences at the highest rate within the limit.

    None if no price was given, or if no rate stayed within the limit in half of the rounds.
    """
    rate = median([rate or 0.0 for rate in rates]) if rates else 0.0
    if price_per_hour is None or rate <= 0:
        return None
    return price_per_hour / SECONDS_IN_HOUR / rate * MILLION


def evaluate(contender: MeasuredCandidate, server: ReadyServer) -> str | None:
    """Measure the metric on the labelled rows; return the reason if that fails, or None."""
    if contender.labelled is None:
        return None
    asked, decided = contender.labelled
    labels = asked.labels
    assert labels is not None
    try:
        found = answer_collection.given(asked, server.http_target)
        side = quality.scored(decided, [one.tensors for one in found])
        truth = quality.truth_of(labels, side.decisions.size)
    except (Unanswered, ValueError) as error:
        return f"the labelled rows cannot be sent: {error}"
    contender.quality = quality.quality(decided, truth, side, CONFIDENCE)
    return None


def check(contender: MeasuredCandidate, server: ReadyServer) -> str | None:
    """Check the server's answers to every request of the file, one after another, before any load.

    Returns:
        The problem, or None. A candidate with wrong answers is out, however fast.
    """
    problems, count = [], len(contender.payloads.requests)
    with AnswerCheck(server.http_target, contender.payloads) as examination:
        for number in range(count):
            try:
                problems.append(examination.problem(number))
            except Unanswered as error:
                return f"request {number + 1} of {count} failed before any load: {error}"
    wrong = [problem for problem in problems if problem is not None]
    if not wrong:
        return None
    return f"{len(wrong)} of {count} answers were wrong before any load: {wrong[0]}"
