"""The decision is a pure function, and wrong as seldom as it says."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest

from modelport.gateway.slo import Slo, parse
from modelport.loadtests.checks import CheckStatus
from modelport.loadtests.gate import decision, json_document
from modelport.loadtests.gate.criteria import PairedRound, SideMeasurements, half_of
from modelport.loadtests.gate.decision import GateDecision, Looks, Question, decide
from modelport.loadtests.load.samples import SAMPLE, LoadProfile, LoadRun, Outcome
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from tests.loadtests.gating import simulation
from tests.loadtests.gating.simulation import (
    IDENTICAL,
    QUIET,
    ROUGH,
    SHARED,
    SLOWER_TAIL,
    WRONG,
    Loading,
    Machine,
    Release,
    simulated,
)
from tests.thorough import thorough

PASS, FAIL, INCONCLUSIVE = CheckStatus.PASS, CheckStatus.FAIL, CheckStatus.INCONCLUSIVE


def rounds(
    release: Release,
    count: int,
    seed: int = 0,
    machine: Machine = QUIET,
    loading: Loading = Loading.TURNS,
) -> list[PairedRound]:
    stream = simulated(machine, loading, np.random.default_rng(seed))
    return simulation.released(list(itertools.islice(stream, count)), release, seed)


def answer(name: str, found: tuple[Question, ...]) -> Question:
    (question,) = (one for one in found if one.name == name)
    return question


def tally(
    release: Release, machine: Machine, loading: Loading, count: int, most_rounds: int
) -> simulation.Tally:
    streams = functools.partial(simulated, machine, loading)
    (found,) = simulation.gates(
        streams, Slo(), releases=[release], most_rounds=[most_rounds], count=count
    ).values()
    return found


@pytest.mark.parametrize(
    ("loading", "machine"),
    [
        (Loading.TURNS, SHARED),
        (Loading.SLICES, ROUGH),
        thorough(Loading.TURNS, ROUGH),
        thorough(Loading.SLICES, SHARED),
    ],
    ids=lambda value: value.name,
)
def test_identical_builds_fail_in_at_most_5_of_100_gates(
    loading: Loading, machine: Machine
) -> None:
    found = tally(IDENTICAL, machine, loading, count=100, most_rounds=6)
    assert found.counts[FAIL] <= 5


@pytest.mark.parametrize(("machine", "most_rounds"), [(QUIET, 12), thorough(SHARED, 24)])
def test_identical_builds_that_are_asked_in_turn_pass(machine: Machine, most_rounds: int) -> None:
    found = tally(IDENTICAL, machine, Loading.TURNS, count=20, most_rounds=most_rounds)
    assert found.counts[FAIL] <= 1
    assert found.counts[PASS] >= 14


@pytest.mark.parametrize(("machine", "most_rounds"), [(QUIET, 12), thorough(SHARED, 24)])
def test_a_p99_that_is_15_percent_slower_fails_and_never_passes(
    machine: Machine, most_rounds: int
) -> None:
    found = tally(SLOWER_TAIL, machine, Loading.TURNS, count=20, most_rounds=most_rounds)
    assert found.counts[PASS] == 0
    assert found.counts[FAIL] >= 18


def test_one_wrong_answer_in_a_hundred_fails_at_the_first_looks() -> None:
    found = tally(WRONG, SHARED, Loading.SLICES, count=20, most_rounds=24)
    assert found.counts[FAIL] == 20
    assert found.rounds <= 3 * 20


def test_a_candidate_that_is_faster_passes() -> None:
    found = decide(rounds(dataclasses.replace(IDENTICAL, everything=0.8), 12), Slo())
    assert {question.status for question in found} == {PASS}


def test_every_criterion_of_the_slo_is_asked_and_no_other() -> None:
    limits = {
        "p50_ms": 5.0,
        "p99_ms": 50.0,
        "first_byte_p50_ms": 5.0,
        "first_byte_p99_ms": 50.0,
        "first_response_seconds": 9.0,
        "cold_start_seconds": 9.0,
    }
    changes = {
        "max_first_byte_p50_regression": 0.5,
        "max_first_byte_p99_regression": 0.5,
        "max_cold_start_regression": 0.5,
    }
    slo = parse({"limits": limits, "regressions": changes})
    found = decide(rounds(IDENTICAL, 8), slo)
    assert sorted(one.name for one in found if not one.relative) == [
        "cold start",
        "error share",
        "p50",
        "p99",
        "time to first byte, p50",
        "time to first byte, p99",
        "time to first response, cold",
        "wrong answers",
    ]
    assert sorted(one.name for one in found if one.relative) == [
        "cold start, against the baseline",
        "p50, against the baseline",
        "p99, against the baseline",
        "time to first byte, p50, against the baseline",
        "time to first byte, p99, against the baseline",
        "time to first response, cold, against the baseline",
    ]
    off = dict.fromkeys(("max_error_share", "max_wrong_share"), False)
    none = dict.fromkeys(
        ("max_p50_regression", "max_p99_regression", "max_first_response_regression"), False
    )
    assert decide(rounds(IDENTICAL, 3), parse({"limits": off, "regressions": none})) == ()


@pytest.mark.parametrize(("limit", "status"), [(100.0, PASS), (0.5, FAIL)])
def test_an_absolute_limit_is_held_against_the_candidate_alone(
    limit: float, status: CheckStatus
) -> None:
    found = answer("p99", decide(rounds(IDENTICAL, 8), parse({"limits": {"p99_ms": limit}})))
    assert found.status is status
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.change < found.high  # type: ignore[operator]
    assert found.candidate == pytest.approx(found.change)


def test_a_server_that_runs_already_is_not_asked_for_its_start() -> None:
    found = [
        PairedRound(
            dataclasses.replace(one.baseline, first_response_seconds=None),
            one.candidate,
        )
        for one in rounds(IDENTICAL, 8)
    ]
    assert not [one for one in decide(found, Slo()) if "first response" in one.name]


def test_too_few_requests_are_inconclusive_and_say_how_many_more() -> None:
    few = [
        PairedRound(
            *(dataclasses.replace(half, latencies_ms=half.latencies_ms[:100]) for half in both)
        )
        for both in ((one.baseline, one.candidate) for one in rounds(IDENTICAL, 6))
    ]
    found = answer("p99, against the baseline", decide(few, Slo()))
    assert found.status is INCONCLUSIVE
    assert "600 requests; p99 needs 1000, 400 more" in found.detail
    assert found.longer > 1


def test_few_rounds_decide_nothing_about_latency_but_wrong_answers_fail() -> None:
    found = decide(rounds(dataclasses.replace(WRONG, everything=3.0), 2), Slo())
    assert answer("p50, against the baseline", found).status is INCONCLUSIVE
    assert "more rounds are required" in answer("p50, against the baseline", found).detail
    assert answer("wrong answers", found).status is FAIL


def test_errors_beyond_the_budget_fail_and_within_it_pass() -> None:
    assert (
        answer(
            "error share", decide(rounds(dataclasses.replace(IDENTICAL, errors=0.02), 6), Slo())
        ).status
        is FAIL
    )
    loose = parse({"limits": {"max_error_share": 0.05}})
    found = decide(rounds(dataclasses.replace(IDENTICAL, errors=0.02), 6), loose)
    assert answer("error share", found).status is PASS


def test_where_no_wrong_answer_is_allowed_a_single_one_fails_and_a_thousand_right_ones_pass() -> (
    None
):
    strict = parse({"limits": {"max_wrong_share": 0}})
    clean = rounds(IDENTICAL, 6)
    assert answer("wrong answers", decide(clean, strict)).status is PASS
    one_wrong = dataclasses.replace(clean[0].candidate, wrong=1)
    spoiled = [PairedRound(clean[0].baseline, one_wrong), *clean[1:]]
    assert answer("wrong answers", decide(spoiled, strict)).status is FAIL
    short = dataclasses.replace(clean[0].candidate, asked=500)
    found = answer("wrong answers", decide([PairedRound(clean[0].baseline, short)], strict))
    assert (found.status, found.longer) == (INCONCLUSIVE, 2.0)


def test_an_open_question_says_how_much_longer() -> None:
    found = decide(rounds(SLOWER_TAIL, 5, seed=3), parse({"verdict": {"confidence": 0.9999}}))
    waiting = [one for one in found if one.status is INCONCLUSIVE]
    assert waiting
    assert all(one.longer > 1 for one in waiting)
    more = decision.more_seconds(found, 100.0)
    assert more is None or more > 0
    assert decision.more_seconds((), 100.0) == 0
    on_the_limit = Question("p50", "ms", INCONCLUSIVE, longer=math.inf)
    assert decision.more_seconds((on_the_limit,), 100.0) is None


def test_it_takes_about_as_much_longer_as_it_says() -> None:
    """The estimate of a noisy open question, against what the same stream then needs."""
    ratios = []
    for seed in range(8):
        every = rounds(SLOWER_TAIL, 80, seed, SHARED, Loading.SLICES)
        name = "p99, against the baseline"
        said = answer(name, decide(every[:8], Slo()))
        if said.status is not INCONCLUSIVE or said.longer > 6:
            continue
        taken = 8
        while answer(name, decide(every[:taken], Slo())).status is INCONCLUSIVE and taken < 80:
            taken += 4
        ratios.append(taken / 8 / said.longer)
    assert 0.25 < float(np.median(ratios)) < 4


def test_a_look_is_taken_at_its_time_and_the_error_is_spent_once() -> None:
    looks, seen = Looks(Slo()), rounds(IDENTICAL, 8)
    assert not looks.at(seen[:1], 0.01)
    assert looks.questions == ()
    looks.at(seen, 0.3)
    early = answer("p99, against the baseline", looks.questions)
    assert not looks.at(seen, 0.35)
    assert answer("p99, against the baseline", looks.questions) is early
    assert looks.at(seen, 1.0)
    late = answer("p99, against the baseline", looks.questions)
    assert late.high is not None
    assert early.high is not None
    assert late.high < early.high  # most of the error is kept for the last look


def run(outcomes: list[Outcome]) -> LoadRun:
    samples = np.zeros(len(outcomes), SAMPLE)
    samples["intended"] = np.arange(len(outcomes))
    samples["sent"] = samples["intended"] + 0.25
    samples["first_byte"] = samples["sent"] + 0.25
    samples["done"] = samples["intended"] + 1.0
    samples["outcome"] = outcomes
    return LoadRun(
        LoadTestTarget(LoadTestProtocol.OIP_HTTP, "127.0.0.1:1", "m"), LoadProfile(), samples
    )


def test_latency_counts_from_the_intended_sending_and_with_what_timed_out() -> None:
    found = half_of(
        [
            run([Outcome.OK, Outcome.WRONG, Outcome.TIMED_OUT]),
            run([Outcome.REFUSED, Outcome.FAILED, Outcome.OK]),
        ],
        1.5,
        2.5,
    )
    assert found.latencies_ms.tolist() == [1000.0] * 4
    assert found.first_bytes_ms.tolist() == [250.0] * 3
    assert (found.asked, found.wrong, found.errors) == (6, 1, 3)
    assert (found.cold_start_seconds, found.first_response_seconds) == (1.5, 2.5)


def test_a_decision_reads_as_checks_and_as_a_document() -> None:
    found = decide(rounds(WRONG, 6), parse({"limits": {"p99_ms": 50.0}}))
    whole = GateDecision(FAIL, found, "a", "b", more_seconds=math.inf, seconds=3.0)
    checks = {check.name: check for check in whole.checks}
    assert checks["wrong answers"].status is FAIL
    assert "at most 0.1" in checks["wrong answers"].bound
    assert "%" in checks["wrong answers"].observed
    assert checks["p99, against the baseline"].bound == "at most +5.0 %"
    assert checks["p99"].bound == "at most 50.0 ms"
    told = json_document.document(whole)
    assert told["status"] == "fail"
    assert told["more_seconds"] is None
    assert [one["name"] for one in told["questions"]] == [one.name for one in found]


def test_a_half_without_an_answer_is_no_latency() -> None:
    nothing = SideMeasurements(np.array([]), np.array([]), asked=50, wrong=0, errors=50)
    found = decide([PairedRound(rounds(IDENTICAL, 1)[0].baseline, nothing)] * 5, Slo())
    assert answer("p99, against the baseline", found).status is INCONCLUSIVE
    assert answer("error share", found).status is FAIL
