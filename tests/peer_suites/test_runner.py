"""The runner of the peers' suites: what it counts, lists and reports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from modelport.loadtests.system.environments import Missing
from tests.peer_suites import report, sources
from tests.peer_suites.sources import PinnedSource
from tests.peer_suites.suite import Bench, Suite, SuiteOutcome, SuiteVerdict, declared_tests

SOURCE = PinnedSource("somebody/tests", "0" * 40)
FILE = """
import unittest

class Some(unittest.TestCase):
    def test_good(self):
        print("printed")
    def test_bad(self):
        self.assertEqual(1, 2, "one is not two")
    def test_gpu(self):
        raise AssertionError("it ran")
    def test_forgotten(self):
        pass
"""


def suite(run: object = None, **fields: object) -> Suite:
    return Suite("some", "Some tests", (SOURCE,), (), run, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("source")
    (folder / "some_test.py").write_text(FILE)
    not_applicable = {"folder/some_test.py::Some::test_gpu": "GPU"}
    return Bench({SOURCE: folder}, folder, Path(sys.executable), not_applicable)


@pytest.fixture(scope="module")
def outcomes(bench: Bench) -> list[SuiteOutcome]:
    return ran(bench)


def ran(bench: Bench, select: str = "not forgotten") -> list[SuiteOutcome]:
    file = bench.source(SOURCE) / "some_test.py"
    return list(bench.pytest(file, "folder/some_test.py", select=select))


def test_each_test_of_a_file_has_its_verdict(outcomes: list[SuiteOutcome]) -> None:
    found = {outcome.test.rpartition("::")[2]: outcome for outcome in outcomes}
    assert {name: outcome.verdict for name, outcome in found.items()} == {
        "test_good": SuiteVerdict.PASS,
        "test_bad": SuiteVerdict.FAIL,
        "test_gpu": SuiteVerdict.NOT_APPLICABLE,
    }
    assert found["test_gpu"].detail == "GPU"
    assert "one is not two" in found["test_bad"].detail


@pytest.mark.thorough
def test_a_file_that_cannot_be_imported_is_a_failure(bench: Bench) -> None:
    (bench.source(SOURCE) / "broken_test.py").write_text("import no_such_module")
    (outcome,) = bench.pytest(bench.source(SOURCE) / "broken_test.py", "folder/broken_test.py")
    assert outcome.verdict is SuiteVerdict.FAIL
    assert "no_such_module" in outcome.detail


def test_a_test_of_what_the_gateway_lacks_may_run_and_fail(outcomes: list[SuiteOutcome]) -> None:
    bad, good = "folder/some_test.py::Some::test_bad", "folder/some_test.py::Some::test_good"
    lacking = suite(not_supported={bad: "no such feature", good: "no such feature"})
    judged = report.judged(lacking, outcomes)
    assert SuiteOutcome(bad, SuiteVerdict.NOT_SUPPORTED, "no such feature") in judged
    assert report.unexpected(lacking, judged) == [
        f"{good} passes: take it out of the expected failures"
    ]


@pytest.mark.thorough
def test_a_file_may_say_more_than_a_pipe_holds(bench: Bench) -> None:
    text = "def test_loud():\n    raise AssertionError('loud' * 100_000)\n"
    (bench.source(SOURCE) / "loud_test.py").write_text(text)
    (outcome,) = bench.pytest(bench.source(SOURCE) / "loud_test.py", "folder/loud_test.py")
    assert outcome.verdict is SuiteVerdict.FAIL


def test_a_failure_is_unexpected_unless_it_is_listed_and_a_listed_pass_is_too(
    outcomes: list[SuiteOutcome],
) -> None:
    bad, good = "folder/some_test.py::Some::test_bad", "folder/some_test.py::Some::test_good"
    assert [line.split(":: ")[0][: len(bad)] for line in report.unexpected(suite(), outcomes)] == [
        bad
    ]
    assert report.unexpected(suite(expected_failures={bad: "known"}), outcomes) == []
    listed = suite(expected_failures={bad: "known", good: "known"})
    assert report.unexpected(listed, outcomes) == [
        f"{good} passes: take it out of the expected failures"
    ]


def test_a_test_that_did_not_run_is_in_the_table(
    bench: Bench, outcomes: list[SuiteOutcome], tmp_path: Path
) -> None:
    def declared(bench: Bench) -> Iterator[str]:
        return declared_tests(bench.source(SOURCE) / "some_test.py", "folder/some_test.py")

    known = suite(declared=declared)
    listed = report.with_missing(known, bench, report.judged(known, outcomes))
    assert report.counts(listed) == {
        **{
            "pass": 1,
            "changed set-up": 0,
            "fail": 1,
            "not supported": 0,
            "not applicable": 1,
            "not run": 1,
        }
    }
    forgotten = "folder/some_test.py::Some::test_forgotten"
    assert f"{forgotten} did not run: give it a gateway, or a reason" in report.unexpected(
        known, listed
    )
    lacking = suite(declared=declared, not_supported={forgotten: "no such feature"})
    explained = report.with_missing(lacking, bench, report.judged(lacking, outcomes))
    assert report.counts(explained) == {
        **{
            "pass": 1,
            "changed set-up": 0,
            "fail": 1,
            "not supported": 1,
            "not applicable": 1,
            "not run": 0,
        }
    }
    report.write(tmp_path, {"some": known}, {"some": listed}, "")
    table = (tmp_path / "peer-suites.md").read_text()
    assert "| [Some tests](#some) | 1 | 0 | 1 | 0 | 1 | 1 |" in table
    assert "::test_bad` | fail | AssertionError: 1 != 2 : one is not two |" in table
    assert "::test_gpu` | not applicable | GPU |" in table


def test_a_pass_with_a_changed_set_up_is_no_pass(
    bench: Bench, outcomes: list[SuiteOutcome], tmp_path: Path
) -> None:
    """Not even if another run of the same test has the peer's own set-up."""
    good = "folder/some_test.py::Some::test_good"
    changed = suite(changed_setup={"folder/some_test.py": "an echo in place of the model"})
    told = SuiteOutcome(good, SuiteVerdict.CHANGED, "an echo in place of the model")
    judged = report.judged(changed, outcomes)
    assert told in judged
    assert report.counts(judged)["pass"] == 0
    assert report.counts(judged)["fail"] == 1
    own = SuiteOutcome(good, SuiteVerdict.PASS)
    for order in ([told, own], [own, told]):
        assert report.judged(suite(), order) == [told]
    report.write(tmp_path, {"some": changed}, {"some": judged}, "0123456789ab")
    table = (tmp_path / "peer-suites.md").read_text()
    assert f"`{good}` | changed set-up | an echo in place of the model |" in table
    assert "0 of 2 tests that ran (0.0%) pass with the peer's own set-up" in table
    assert "The gateway was at 0123456789ab." in table


def test_a_pass_in_place_of_what_is_not_to_be_had_does_not_apply(
    outcomes: list[SuiteOutcome],
) -> None:
    good, why = "folder/some_test.py::Some::test_good", "needs TensorRT; it passes with ONNX"
    judged = report.judged(suite(changed_setup={"folder/some_test.py": why}), outcomes)
    told = SuiteOutcome(good, SuiteVerdict.NOT_APPLICABLE, why)
    assert told in judged
    assert report.counts(judged)["fail"] == 1  # a failure stays one
    assert report.judged(suite(), [told, SuiteOutcome(good, SuiteVerdict.PASS)]) == [told]


def test_of_several_runs_of_one_test_the_worst_verdict_stays() -> None:
    order = ("fail", "not supported", "changed set-up", "not applicable", "pass")
    outcomes = [SuiteOutcome("t", SuiteVerdict(verdict)) for verdict in order]
    lacking = {"t": "no such feature"}
    for worse, better in combinations(outcomes[1:], 2):
        for runs in ([worse, better], [better, worse]):
            assert [found.verdict for found in report.judged(suite(), runs)] == [worse.verdict]
    for other in outcomes[1:]:
        for known, verdict in (({}, "fail"), (lacking, "not supported")):
            for runs in ([outcomes[0], other], [other, outcomes[0]]):
                (found,) = report.judged(suite(not_supported=known), runs)
                assert found.verdict == verdict


def test_processes_of_a_run_share_its_tests(bench: Bench, tmp_path: Path) -> None:
    one = Bench({}, tmp_path, bench.python, {})
    first, second = one.beside("first"), one.beside("second")
    assert first.work != second.work
    assert [first.claims("a"), second.claims("a"), second.claims("b"), first.claims("b")] == [
        *(True, False, True, False),
    ]
    again = one.beside("again", {"b"})
    assert [again.claims(part) for part in "abb"] == [False, True, True]
    assert again.claimed == "b"


def test_a_script_passes_by_its_exit_status_and_what_it_says(bench: Bench, tmp_path: Path) -> None:
    for code, says, verdict in (
        ("print('PASS')", "PASS", SuiteVerdict.PASS),
        ("print('done')", "PASS", SuiteVerdict.FAIL),
        ("raise SystemExit('PASS')", "PASS", SuiteVerdict.FAIL),
    ):
        assert bench.script("script", "-c", code, cwd=tmp_path, says=says).verdict is verdict


def test_sources_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(Missing, match=r"clone .* there"):
        sources.checkout(SOURCE, tmp_path / "nowhere")
