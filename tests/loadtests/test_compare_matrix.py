"""The verdict matrix is a pure function of the candidates."""

from __future__ import annotations

from typing import Any

import pytest

from modelport.loadtests.compare import deployment_facts
from modelport.loadtests.compare.result import Candidate, Comparison, ConcernVerdict
from modelport.loadtests.compare.verdict_matrix import matrix
from modelport.loadtests.report.matrix_text import lines
from tests.loadtests.contenders import SLO_P99_MS, candidate

CONCERNS = (
    "Tail latency",
    "Throughput",
    "Cold start",
    "Memory",
    "Artifact size",
    "Accuracy",
    "Edge deployment",
    "Operational maturity",
)


def verdicts(*candidates: Candidate) -> dict[str, ConcernVerdict]:
    return {verdict.concern: verdict for verdict in matrix(candidates, SLO_P99_MS)}


def comparison(*candidates: Candidate) -> Comparison:
    made = matrix(candidates, SLO_P99_MS)
    return Comparison("m", "", "", 1.0, {}, SLO_P99_MS, 3, candidates, matrix=made)


def names(verdict: ConcernVerdict) -> list[str]:
    return [name for name, _, _ in verdict.ranking]


def test_every_concern_has_its_line_in_order() -> None:
    assert tuple(verdicts(candidate("a"), candidate("b"))) == CONCERNS


def test_a_candidate_twice_as_fast_in_every_round_wins_beyond_the_noise() -> None:
    slow = candidate("slow", p99=(20.0, 20.4, 19.8), rates=(250.0, 251.0, 249.0))
    found = verdicts(slow, candidate("fast"))
    for concern in ("Tail latency", "Throughput"):
        assert found[concern].winner == "fast"
        assert found[concern].margin == pytest.approx(2.0, rel=0.05)
        assert found[concern].beyond_noise


def test_a_lead_that_not_every_round_confirms_has_no_winner() -> None:
    found = verdicts(candidate("a", p99=(10, 14, 9)), candidate("b", p99=(11, 10, 12)))
    tail = found["Tail latency"]
    assert (tail.winner, tail.beyond_noise) == (None, False)
    assert tail.margin is not None
    assert names(tail) == ["a", "b"]


def test_of_one_round_nothing_is_beyond_the_noise() -> None:
    found = verdicts(
        candidate("a", p99=(1.0,), rates=(900.0,)), candidate("b", p99=(50.0,), rates=(9.0,))
    )["Tail latency"]
    assert (found.winner, found.beyond_noise) == (None, False)
    assert found.margin == pytest.approx(50.0)
    assert "one round" in found.note


def test_a_disqualified_candidate_is_not_ranked_however_fast() -> None:
    wrong = candidate("wrong", p99=(0.1,) * 3, rates=(9e9,) * 3, disqualified="wrong answers")
    for verdict in matrix([candidate("a"), wrong, candidate("b")], SLO_P99_MS):
        assert "wrong" not in names(verdict)
        assert verdict.winner != "wrong"
        assert "disqualified: wrong" in verdict.note


def test_there_is_no_winner_if_all_are_disqualified() -> None:
    found = matrix([candidate("a", disqualified="no")], SLO_P99_MS)
    assert {verdict.winner for verdict in found} == {None}
    assert [verdict.ranking for verdict in found] == [()] * len(CONCERNS)


def test_a_candidate_far_slower_than_all_is_last_and_named() -> None:
    slow = candidate("snail", p99=(90.0, 95.0, 92.0), rates=(20.0, 21.0, 19.0))
    found = verdicts(slow, candidate("a"), candidate("b", p99=(12.0, 12.1, 11.9)))
    for concern in ("Tail latency", "Throughput"):
        assert names(found[concern])[-1] == "snail"
        assert "far behind: snail" in found[concern].note


def test_a_rate_that_no_round_reached_counts_as_nothing() -> None:
    found = verdicts(candidate("never", rates=(None,) * 3), candidate("a"))["Throughput"]
    assert found.ranking[-1][:2] == ("never", 0.0)
    assert (found.winner, found.margin) == ("a", None)
    assert "at no rate within the limit: never" in found.note
    assert verdicts(candidate("never", rates=(None,) * 3))["Throughput"].winner is None


def test_a_single_candidate_wins_without_a_margin() -> None:
    found = verdicts(candidate("only"))["Memory"]
    assert (found.winner, found.margin, found.beyond_noise) == ("only", None, False)


def test_the_larger_file_loses_by_its_ratio_which_no_noise_moves() -> None:
    found = verdicts(candidate("a", artifact_bytes=3000), candidate("b"))["Artifact size"]
    assert (found.winner, found.margin, found.beyond_noise) == ("b", 3.0, True)


def test_candidates_that_are_level_are_said_to_be() -> None:
    found = verdicts(candidate("a"), candidate("b"))["Artifact size"]
    assert (found.winner, found.margin, found.beyond_noise) == (None, 1.0, False)
    assert "level with b" in found.note


def test_fewer_decisions_kept_lose_beyond_the_noise_only_if_there_are_enough() -> None:
    exact = candidate("exact")
    off = candidate("off", agreement=0.99, max_abs_error=0.1)
    few = candidate("few", agreement=0.99, decisions=100, max_abs_error=0.1)
    assert verdicts(off, exact)["Accuracy"].winner == "exact"
    assert verdicts(off, exact)["Accuracy"].beyond_noise
    assert not verdicts(few, exact)["Accuracy"].beyond_noise
    assert verdicts(few, exact)["Accuracy"].winner is None


def test_of_equally_accurate_candidates_the_smaller_error_is_first() -> None:
    found = verdicts(candidate("a", max_abs_error=1e-3), candidate("b"))["Accuracy"]
    assert (found.winner, found.beyond_noise) == (None, False)
    assert names(found) == ["b", "a"]


def test_where_labels_are_known_accuracy_is_measured_and_not_parity() -> None:
    def measured(name: str, accuracy: float, metric: str = "accuracy", **more: Any) -> Candidate:
        known = {"metric_name": metric, "metric": accuracy}
        return candidate(name, metric_interval=(accuracy - 0.01, accuracy + 0.01), **known, **more)

    exact = measured("exact", 0.9)
    better = measured("better", 0.95, agreement=0.9)  # other decisions, and better ones
    found = verdicts(exact, better)["Accuracy"]
    assert (found.winner, found.beyond_noise) == ("better", True)
    assert found.measure == "accuracy on labelled rows, %"
    assert found.ranking[0][1] == pytest.approx(95.0)
    level = verdicts(exact, measured("level", 0.91, agreement=0.9))["Accuracy"]
    assert (level.winner, level.beyond_noise) == (None, False)
    auc = verdicts(measured("a", 0.9, "AUC"), measured("b", 0.8, "AUC"))["Accuracy"]
    assert (auc.winner, auc.measure) == ("a", "AUC on labelled rows")


def test_a_tie_has_no_winner() -> None:
    found = comparison(candidate("a", p99=(10, 14, 9)), candidate("b", p99=(11, 10, 12)))
    (line,) = (one for one in lines(found) if one.concern == "Tail latency")
    assert (line.winner, line.noise) == (None, "within")
    assert line.margin.startswith("a ")
    assert line.second is not None
    assert line.second.name == "b"
    (size,) = (one for one in lines(found) if one.concern == "Artifact size")
    assert size.margin == "a is level with"


def test_servers_and_formats_that_need_python_are_not_for_the_edge() -> None:
    found = verdicts(
        candidate("server", format="torchscript", backend="torchserve"),
        candidate("program", format="pt2", backend="pytorch"),
        candidate("onnx"),
    )["Edge deployment"]
    assert names(found) == ["onnx"]
    assert "server: a server" in found.note
    assert "torch.export.load is a Python function" in found.note


def test_the_size_on_the_edge_is_that_of_artifact_and_installed_library() -> None:
    found = verdicts(candidate("onnx"))["Edge deployment"]
    library = deployment_facts.runtime_bytes("onnxruntime")
    assert library is not None
    assert library > 1_000_000
    assert found.ranking[0][1] == library + 1000


def test_an_archived_upstream_and_a_deprecated_format_count_against_maturity() -> None:
    held, missing = deployment_facts.maturity("torchscript", "torchserve")
    kept, lacking = deployment_facts.maturity("savedmodel", "tfserving")
    assert held + len(missing) == kept + len(lacking) == len(deployment_facts.MATURITY) + 1
    assert kept > held
    assert any("archived" in fact for fact in missing)
    assert any("TorchScript" in fact for fact in missing)
