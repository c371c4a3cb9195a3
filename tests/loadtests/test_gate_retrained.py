"""A candidate that was trained again: held to its own checkpoint, beside the baseline in a report.

One gate is real. The others rehearse with servers in threads, and have no rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from modelport.gateway.errors import UsageError
from modelport.gateway.slo import Slo, parse
from modelport.loadtests.cli import gate as cli
from modelport.loadtests.gate import agreement, object_storage, paired_rounds
from modelport.loadtests.gate.baseline_and_candidate import Published, Stored
from modelport.loadtests.gate.decision import Question
from modelport.loadtests.gate.paired_rounds import Cores, LiveSide, PairedMeasurement, SideFailed
from modelport.loadtests.gate.preflight import Preflight, PreflightResult
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.model_quality import Deciding
from modelport.loadtests.serving.gateway import MeasuredGateway
from modelport.loadtests.serving.server import MeasuredServerLaunch
from tests.loadtests import oip_server
from tests.loadtests.gating.models import published, version

pytestmark = pytest.mark.thorough

#: What time decides is switched off: one round settles the rest on any machine.
SLO = """
[limits]
max_error_share = 0.5
max_wrong_share = 0.5
[regressions]
max_p50_regression = false
max_p99_regression = false
max_first_response_regression = false
[duration]
slice_seconds = 0.4
warmup_seconds = 0.1
slices = 1
"""
OLD, NEW = 64 * "1", 64 * "2"
ROWS = 64
SLOW = pytest.mark.skipif("MODELPORT_SLOW_TESTS" not in os.environ, reason="slow")


@dataclass(frozen=True)
class GateResult:
    """The result of one gate: exit code, JSON document, and all of its output."""

    status: int
    document: Mapping[str, Any]
    said: str

    def question(self, name: str) -> Mapping[str, Any]:
        (found,) = (one for one in self.document["questions"] if one["name"] == name)
        return dict(found)


def gate(*arguments: object, tmp_path: Path, slo: str = SLO) -> GateResult:
    """``modelport gate`` in this process."""
    path, report = tmp_path / "slo.toml", tmp_path / "gate.json"
    path.write_text(slo)
    report.unlink(missing_ok=True)
    told = [*map(str, arguments), "--slo", str(path), "--json-report", str(report)]
    found = CliRunner().invoke(cli.gate, told)
    document = json.loads(report.read_text()) if report.exists() else {}
    return GateResult(found.exit_code, document, found.output)


@dataclass
class InThreads(PairedMeasurement):
    """Versions whose servers multiply by ``factors``, whatever their artifacts do."""

    factors: tuple[float, float] = (2.0, 3.0)

    @contextlib.contextmanager
    def live(self, number: int) -> Iterator[LiveSide]:
        def answer(_: int, x: list[float]) -> tuple[int, list[float]]:
            return 200, [self.factors[number] * value for value in x]

        with oip_server.serving(answer) as server:
            yield LiveSide(LoadTestTarget(self.protocol, server.address, "tiny"), None, None)


def rehearse(
    model: Path,
    factors: tuple[float, float],
    *,
    slo: Mapping[str, Any] | None = None,
    data: Path | None = None,
    candidate: int = 2,
    kind: type[InThreads] = InThreads,
) -> PreflightResult:
    """The preflight of version 1 against ``candidate``, served by ``factors``."""
    work = model.parent / "work"
    work.mkdir(exist_ok=True)
    limits: Slo = parse(slo or {})
    held = kind(
        tuple(Published(str(model / str(n)), model, str(n)) for n in (1, candidate)),  # type: ignore[arg-type]
        *(LoadTestProtocol.OIP_HTTP, limits, 0, work, Cores(), lambda text: None),
        time.monotonic() + 600,
        factors=factors,
    )
    return Preflight(held, data).run()


def failed(found: PreflightResult) -> Question:
    (question,) = (one for one in found.questions if one.status == "fail")
    return question


def retrained(folder: Path, factor: float = 3.0, answers: float | None = 3.0) -> Path:
    """Two versions of different checkpoints; the second is what the arguments say."""
    version(folder, 1, 2.0, checkpoint=OLD, answers=2.0, decision=True)
    version(folder, 2, factor, checkpoint=NEW, answers=answers, decision=True)
    return folder


def held_out(path: Path, right: float = 1.0) -> Path:
    """Rows whose label is the largest of four, for as large a part of them as ``right``."""
    rows = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    labels = rows.argmax(1)
    wrong = round(ROWS * (1 - right))
    labels[:wrong] = (labels[:wrong] + 1) % 4
    np.savez(path, x=rows, labels=labels)
    return path


def test_a_model_that_was_trained_again_passes_and_the_difference_is_a_report(
    tmp_path: Path,
) -> None:
    model = retrained(tmp_path / "tiny")
    found = gate(model / "1", model / "2", tmp_path=tmp_path)
    assert found.status == 0, found
    assert found.question("answers of its own checkpoint")["status"] == "pass"
    assert found.question("wrong answers")["candidate"] == 0
    differ = found.document["agreement"]
    assert differ["changed"] == 0
    assert differ["relative_error"] == pytest.approx(0.5, abs=1e-3)
    assert "compared with its own checkpoint's answers" in " ".join(found.document["notes"])


def test_wrong_answers_are_reported_at_once_with_input_output_expected_and_difference(
    tmp_path: Path,
) -> None:
    question = failed(rehearse(retrained(tmp_path / "tiny"), (2.0, 3.5)))
    assert (question.name, question.change) == ("wrong answers", 1.0)
    for part in (
        "128 of 128 answers are not the answers of its own checkpoint, such as request 1 (x = [[",
        "output 'y' is ",
        " at [0, 0], expected ",
        "a difference of ",
        "allowed is 5e-06 + 1e-05 x |expected|",
    ):
        assert part in question.detail
    assert "request 1 (x = [[" in question.check.observed + question.check.detail


def test_a_baseline_that_answers_wrongly_decides_nothing_and_is_named(tmp_path: Path) -> None:
    model = retrained(tmp_path / "tiny")
    with pytest.raises(SideFailed, match="the baseline answers wrongly: 128 of 128") as lost:
        rehearse(model, (2.5, 3.0))
    assert not lost.value.is_candidate


def test_one_checkpoint_in_two_versions_keeps_the_strict_comparison(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    version(model, 1, 2.0, answers=2.0)
    version(model, 2, 2.01, answers=2.01)
    strict = failed(rehearse(model, (2.0, 2.01)))
    assert "are not as the baseline's" in strict.detail
    told = rehearse(model, (2.0, 2.01), slo={"answers": {"retrained": True}})
    assert told.agreement is not None
    assert not [one for one in told.questions if one.status != "pass"]


def test_a_baseline_that_contradicts_itself_is_not_the_candidates_fault(tmp_path: Path) -> None:
    model = published(tmp_path / "tiny", versions=2)
    starts = iter((2.0, 2.5, 2.2))  # the baseline's, the candidate's, the baseline's again

    class Fickle(InThreads):
        @contextlib.contextmanager
        def live(self, number: int) -> Iterator[LiveSide]:
            self.factors = (next(starts),) * 2
            with super().live(number) as live:
                yield live

    with pytest.raises(SideFailed, match="the baseline changed its answers to") as lost:
        rehearse(model, (0.0, 0.0), kind=Fickle)
    assert not lost.value.is_candidate


def test_the_error_for_a_candidate_without_recorded_answers_names_the_remedy(
    tmp_path: Path,
) -> None:
    model = retrained(tmp_path / "tiny", answers=None)
    found = gate(model / "1", model / "2", tmp_path=tmp_path)
    assert found.status == 2
    assert f"modelport sample {model / '2'}' records them" in found.said
    assert found.said.count("modelport: error:") == 1


def test_a_baseline_of_an_older_modelport_is_held_to_its_own_first_answers(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    version(model, 1, 2.0, checkpoint=OLD)
    version(model, 2, 3.0, checkpoint=NEW, answers=3.0)
    found = rehearse(model, (2.0, 3.0))
    assert [one.status for one in found.questions] == ["pass"]
    assert f"'modelport sample {model / '1'}' records them" in " ".join(found.notes)


def test_recorded_answers_in_data_are_the_candidates_of_a_pair_that_was_trained_again(
    tmp_path: Path,
) -> None:
    model = retrained(tmp_path / "tiny", answers=None)
    rows, data = np.ones((20, 4), np.float32), tmp_path / "requests.npz"
    np.savez(data, x=rows, y=3 * rows)
    assert rehearse(model, (2.0, 3.0), data=data).questions == ()
    np.savez(data, x=rows, y=2 * rows)  # the baseline's
    assert "are not as --data's" in failed(rehearse(model, (2.0, 3.0), data=data)).detail


def test_accuracy_on_labelled_rows_is_a_limit(tmp_path: Path) -> None:
    model = retrained(tmp_path / "tiny")
    version(model, 3, -3.0, checkpoint=NEW, answers=-3.0, decision=True)
    data = held_out(tmp_path / "held-out.npz", right=0.75)
    kept = rehearse(model, (2.0, 3.0), data=data).questions[-1]
    assert (kept.name, kept.status) == ("accuracy, against the baseline", "pass")
    assert (kept.baseline, kept.candidate, kept.allowed) == (0.75, 0.75, 0.01)
    lost = rehearse(model, (2.0, -3.0), data=data, candidate=3)
    question = failed(lost)
    assert question.baseline == 0.75
    assert question.candidate is not None
    assert question.change == 0.75 - question.candidate > 0.5
    assert lost.agreement is not None
    by_label = lost.agreement.by_label
    assert sum(one.rows for one in by_label) == ROWS
    assert all(one.changed == one.rows for one in by_label)
    assert sum(one.baseline_right or 0 for one in by_label) == 0.75 * ROWS
    allowed: dict[str, Any] = {"regressions": {"max_drop": 1.0}}
    wide = rehearse(model, (2.0, -3.0), data=data, candidate=3, slo=allowed)
    assert wide.questions[-1].status == "pass"


def test_a_limit_on_accuracy_without_labels_is_a_usage_error(tmp_path: Path) -> None:
    model, data = retrained(tmp_path / "tiny"), tmp_path / "rows.npz"
    np.savez(data, x=np.ones((20, 4), np.float32))
    with pytest.raises(UsageError, match="max_drop needs 'labels' in --data"):
        rehearse(model, (2.0, 3.0), data=data, slo={"regressions": {"max_drop": 0.1}})
    found = gate(model / "1", model / "2", "--max-drop", "0.1", tmp_path=tmp_path)
    assert (found.status, "needs rows with their labels" in found.said) == (2, True)


@pytest.mark.parametrize(
    ("command", "ready", "left", "is_candidate", "said"),
    [
        (("false",), 60, 60, True, "does not start: exited with 1 before it was ready"),
        (("sleep", "60"), 1, 60, True, "does not start: not ready after 1 s"),
        (("sleep", "60"), 60, 1, False, "s that were left of --max-duration 600s (not ready"),
    ],
)
def test_a_candidate_that_does_not_start_is_distinguished_from_one_that_answers_wrongly(
    command: Sequence[str],
    ready: int,
    left: int,
    is_candidate: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model = published(tmp_path / "tiny", versions=2)

    class ReplacedGateway(MeasuredGateway):
        def launch(self, work: Path) -> MeasuredServerLaunch:
            return MeasuredServerLaunch(tuple(command), super().launch(work).targets, lambda: False)

    monkeypatch.setattr(paired_rounds, "MeasuredGateway", ReplacedGateway)
    sides = tuple(Published(str(model / n), model, n) for n in ("1", "2"))
    slo = parse({"duration": {"ready_seconds": ready}})
    held = PairedMeasurement(
        *(sides, LoadTestProtocol.OIP_HTTP, slo, 0, tmp_path, Cores(), lambda text: None),  # type: ignore[arg-type]
        time.monotonic() + left,
    )
    with pytest.raises(SideFailed) as lost, held.live(1):
        pass
    assert said in str(lost.value)
    assert "wrong" not in str(lost.value)
    assert lost.value.is_candidate is is_candidate


@SLOW
def test_a_server_that_answers_wrongly_fails_unmeasured(tmp_path: Path) -> None:
    model = retrained(tmp_path / "tiny", factor=3.0, answers=3.5)
    found = gate(model / "1", model / "2", tmp_path=tmp_path)
    assert (found.status, found.document["rounds"]) == (1, 0)
    assert "request 1 (x = [[" in found.question("wrong answers")["detail"]
    assert "does not start" not in found.said


@SLOW
def test_the_rounds_fit_into_the_longest_duration(tmp_path: Path) -> None:
    """With criteria that nothing decides in that time."""
    model = retrained(tmp_path / "tiny")
    slo = SLO.replace("max_p99_regression = false", "max_p99_regression = 0.001")
    found = gate(model / "1", model / "2", "--max-duration", "30s", slo=slo, tmp_path=tmp_path)
    assert found.document["seconds"] < 1.1 * 30 + 5, found


def test_what_cannot_be_fetched_in_time_decides_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        SideFailed, match="fetching the baseline took all of --max-duration"
    ) as lost:
        object_storage.fetched(Stored("s3://bucket/model/1"), tmp_path / "baseline", 0.001)
    assert not lost.value.is_candidate


def answers(values: object) -> list[dict[str, Any]]:
    return [{"y": np.array([row], np.float32)} for row in np.array(values)]


def test_auc_is_that_of_the_pairs_and_accuracy_that_of_the_rows() -> None:
    truth = [np.array([label]) for label in (0, 0, 1, 1)]
    before, after = answers([[0.1], [0.4], [0.35], [0.8]]), answers([[0.1], [0.2], [0.3], [0.4]])
    found = agreement.compared(before, after, Deciding("y", 0.5), truth, 0.95)
    assert (found.metric, found.baseline, found.candidate) == ("AUC", 0.75, 1.0)
    assert found.changed == 1
    before, after = answers([[1, 0], [1, 0], [0, 1], [0, 1]]), answers([[0, 1]] * 4)
    found = agreement.compared(before, after, Deciding("y"), truth, 0.95)
    assert (found.metric, found.baseline, found.candidate) == ("accuracy", 1.0, 0.5)
    assert found.drop == 0.5
    assert found.low is not None
    assert found.high is not None
    assert found.low <= 0.5 <= found.high


def test_labels_that_are_not_one_for_each_decision_are_refused() -> None:
    with pytest.raises(ValueError, match="1 labels for 2 decisions"):
        agreement.compared(
            *(answers([[1, 0], [1, 0]]), answers([[1, 0], [1, 0]]), Deciding("y")),
            *([np.array([1])], 0.95),
        )
