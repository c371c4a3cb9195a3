"""The decision is a pure function of the plan, the stage, the counts and the time."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from modelport.gateway.rollout.plan import (
    AssignmentKind,
    RolloutLimits,
    RolloutPlan,
    RolloutSide,
)
from modelport.gateway.rollout.statistics import evidence as evidence_module
from modelport.gateway.rollout.statistics.counts import (
    RANKS,
    Attribution,
    SideCounts,
    StageCounts,
)
from modelport.gateway.rollout.statistics.decision import RolloutDecision, RolloutVerdict, decide
from modelport.gateway.rollout.statistics.evidence import (
    CriterionEvidence,
    CriterionStatus,
    criteria_of,
)
from modelport.gateway.rollout.statistics.latency_ranks import LATENCY, LEVELS
from modelport.gateway.rollout.statistics.sequential_tests import (
    OutcomeCounts,
    TrialCounts,
    log_e_value,
)

#: A plan without criteria.
OFF = RolloutLimits(
    max_disagreement=None,
    max_invalid=None,
    max_error_ratio=None,
    max_p50_regression=None,
    max_p99_regression=None,
    max_quality_ratio=None,
)
PLAN = RolloutPlan(
    id=32 * "0",
    model="fraud",
    baseline=RolloutSide("fraud", 1),
    candidate=RolloutSide("fraud", 2),
    shadow=0.1,
    steps=(0.01, 0.25, 1.0),
    min_requests=100,
    min_seconds=60,
    max_seconds=600,
    power=0.0,
)
#: Ranks above the baseline's p50, and its p99.
P50, P99 = LEVELS.index(0.5) + 1, LEVELS.index(0.99) + 1
SHADOW, ONE_PERCENT, QUARTER, ALL = range(4)
#: A shadow stage without a finding.
FLAWLESS = StageCounts(compared=1000)


def canary(requests: int = 1000, **counts: Any) -> StageCounts:
    return StageCounts(candidate=SideCounts(requests), **counts)


def plan(limits: RolloutLimits = PLAN.limits, **changes: Any) -> RolloutPlan:
    return replace(PLAN, limits=limits, **changes)


def evidence(decision: RolloutDecision, name: str) -> CriterionEvidence:
    (found,) = (each for each in decision.criteria if each.name == name)
    return found


def test_a_stage_holds_until_it_has_its_least_requests_and_time() -> None:
    decision = decide(PLAN, SHADOW, [StageCounts(compared=58)], 47.5)
    assert decision.verdict is RolloutVerdict.HOLD
    assert decision.missing == ("42 more compared requests", "13 more seconds")
    decision = decide(PLAN, ONE_PERCENT, [FLAWLESS, canary(99)], 60)
    assert decision.missing == ("1 more requests answered by the candidate",)
    assert decide(PLAN, SHADOW, [], 0).missing[0] == "100 more compared requests"


def test_a_stage_advances_when_it_has_them_and_the_last_promotes() -> None:
    counts = [FLAWLESS, canary(), canary(), canary()]
    verdicts = [decide(PLAN, stage, counts, 60).verdict for stage in range(4)]
    assert verdicts == 3 * [RolloutVerdict.ADVANCE] + [RolloutVerdict.PROMOTE]


def test_a_stage_that_lacks_something_at_its_longest_time_pauses_and_names_it() -> None:
    decision = decide(PLAN, SHADOW, [StageCounts(compared=58)], 600)
    assert decision.verdict is RolloutVerdict.PAUSE
    assert "42 more compared requests" in decision.reason
    assert decide(PLAN, SHADOW, [FLAWLESS], 600).verdict is RolloutVerdict.ADVANCE


def test_a_manual_stage_waits_for_promote_however_long_it_takes() -> None:
    manual = plan(manual=True)
    for seconds in (60, 1e6):
        decision = decide(manual, SHADOW, [FLAWLESS], seconds)
        assert decision.verdict is RolloutVerdict.HOLD
        assert "waits for 'promote'" in decision.reason
    assert decide(manual, SHADOW, [StageCounts(compared=1)], 600).verdict is RolloutVerdict.PAUSE


BROKEN: dict[str, tuple[RolloutLimits, StageCounts]] = {
    "disagreement": (PLAN.limits, canary(compared=300, disagreed=8)),
    "invalid": (replace(OFF, max_invalid=0.001), canary(compared=300, invalid=6)),
    "errors": (PLAN.limits, canary(errors=Attribution(20, 30))),
    "error_share": (
        replace(OFF, max_error_share=0.01),
        StageCounts(candidate=SideCounts(500, errors=50)),
    ),
    "latency": (PLAN.limits, canary(ranks={P99: Attribution(60, 120)})),
    "p50_ms": (
        replace(OFF, p50_ms=5.0),
        StageCounts(candidate=SideCounts(500, over_limit={"p50_ms": 350})),
    ),
    "p99_ms": (
        replace(OFF, p99_ms=50.0),
        StageCounts(candidate=SideCounts(500, over_limit={"p99_ms": 50})),
    ),
    "accuracy": (PLAN.limits, canary(wrong={"accuracy": Attribution(60, 120)})),
    "precision": (PLAN.limits, canary(wrong={"precision": Attribution(60, 120)})),
    "recall": (PLAN.limits, canary(wrong={"recall": Attribution(60, 120)})),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_criterion_rolls_back_and_is_named(name: str) -> None:
    limits, counts = BROKEN[name]
    decision = decide(plan(limits), QUARTER, [FLAWLESS, canary(), counts], 1)
    assert decision.verdict is RolloutVerdict.ROLLBACK
    assert [e.name for e in decision.criteria if e.status is CriterionStatus.BROKEN] == [name]
    assert decision.reason.startswith(f"{name}: ")
    off = plan(OFF)
    assert decide(off, QUARTER, [FLAWLESS, canary(), counts], 1).verdict is RolloutVerdict.HOLD


def test_without_criteria_requests_and_time_decide() -> None:
    decision = decide(plan(OFF), ALL, [FLAWLESS, canary(), canary(), canary()], 60)
    assert decision.verdict is RolloutVerdict.PROMOTE
    assert decision.criteria == ()


def test_the_error_probability_is_divided_among_the_criteria_that_are_switched_on() -> None:
    for limits in (PLAN.limits, replace(OFF, max_error_ratio=2.0), BROKEN["p99_ms"][0]):
        parts = [each.alpha for each in criteria_of(plan(limits), [])]
        assert sum(parts) == pytest.approx(0.05)


def test_without_an_event_nothing_is_known() -> None:
    for each in criteria_of(PLAN, [FLAWLESS, canary()]):
        if each.name not in ("disagreement", "invalid"):
            assert each.status is CriterionStatus.OPEN
            assert (each.events, each.trials) == (0, 0)
            assert each.log_e_value == pytest.approx(0)
            assert each.interval == (None, None, None)


def test_the_evidence_of_earlier_stages_goes_on() -> None:
    """At shares of 1 % and 25 % of the requests; neither stage alone is enough."""
    one, quarter = Attribution(4, 40), Attribution(33, 62)
    first, second = canary(errors=one), canary(errors=quarter)
    for counts in ([FLAWLESS, first], [FLAWLESS, canary(), second]):
        assert decide(PLAN, len(counts) - 1, counts, 1).verdict is RolloutVerdict.HOLD
    decision = decide(PLAN, QUARTER, [FLAWLESS, first, second], 1)
    assert decision.verdict is RolloutVerdict.ROLLBACK
    expected = log_e_value(
        [
            TrialCounts(1.0, 0, 0),
            TrialCounts(0.01 * 1.5 / (0.01 * 1.5 + 0.99), 4, 40),
            TrialCounts(0.25 * 1.5 / (0.25 * 1.5 + 0.75), 33, 62),
        ],
        stages=4,
    )
    assert evidence(decision, "errors").log_e_value == pytest.approx(expected)
    assert evidence(decision, "errors").trials == 102


def test_three_errors_that_only_the_candidate_makes_are_enough_at_a_small_share() -> None:
    for count, verdict in ((2, RolloutVerdict.HOLD), (3, RolloutVerdict.ROLLBACK)):
        counts = [FLAWLESS, canary(errors=Attribution(count, count))]
        assert decide(PLAN, ONE_PERCENT, counts, 1).verdict is verdict


def test_errors_that_hit_both_sides_alike_say_nothing() -> None:
    counts = [FLAWLESS, canary(errors=Attribution(1000, 100_000))]
    assert decide(PLAN, ONE_PERCENT, counts, 60).verdict is RolloutVerdict.ADVANCE


def test_at_a_share_of_one_only_pairs_and_absolute_limits_decide() -> None:
    everything = Attribution(10_000, 10_000)
    counts = canary(errors=everything, ranks={P50: everything}, wrong={"recall": everything})
    before = [FLAWLESS, canary(), canary()]
    assert decide(PLAN, ALL, [*before, counts], 60).verdict is RolloutVerdict.PROMOTE
    counts = canary(compared=300, disagreed=8)
    assert decide(PLAN, ALL, [*before, counts], 60).verdict is RolloutVerdict.ROLLBACK
    limited = plan(replace(PLAN.limits, max_error_share=0.01))
    counts = StageCounts(candidate=SideCounts(1000, errors=50))
    assert decide(limited, ALL, [*before, counts], 60).verdict is RolloutVerdict.ROLLBACK


def test_copies_that_fail_in_shadow_are_the_candidates_errors() -> None:
    """A tenth of the requests is copied, and the baseline fails in none, or in as many."""
    alone = StageCounts(SideCounts(1000), compared=95, failed=5)
    decision = decide(PLAN, SHADOW, [alone], 1)
    assert decision.verdict is RolloutVerdict.ROLLBACK
    assert decision.reason.startswith("errors: ")
    alike = StageCounts(SideCounts(1000, errors=50), compared=95, failed=5)
    assert decide(PLAN, SHADOW, [alike], 1).verdict is RolloutVerdict.HOLD
    limited = plan(replace(OFF, max_error_share=0.005))
    assert decide(limited, SHADOW, [alike], 1).verdict is RolloutVerdict.ROLLBACK


def test_a_canary_counts_the_failure_of_a_pair_once() -> None:
    counts = StageCounts(candidate=SideCounts(1000, errors=2), errors=Attribution(2, 2), failed=2)
    decision = decide(PLAN, ONE_PERCENT, [FLAWLESS, counts], 60)
    assert evidence(decision, "errors").events == 2


def test_labels_of_a_shadow_stage_say_nothing_about_the_candidate() -> None:
    """They are those of the baseline's answers, and a canary's are of either side."""
    wrong = {"accuracy": Attribution(0, 500)}
    before = StageCounts(compared=1000, wrong=wrong)
    found = evidence(decide(PLAN, SHADOW, [before], 60), "accuracy")
    assert (found.log_e_value, found.status) == (0.0, CriterionStatus.OPEN)
    counts = canary(wrong={"accuracy": Attribution(30, 300)})
    decision = decide(PLAN, ONE_PERCENT, [before, counts], 60)
    assert decision.verdict is RolloutVerdict.ROLLBACK
    assert decision.reason.startswith("accuracy: ")


def test_a_suspect_candidate_gets_no_larger_share() -> None:
    """An e-value between 10 and its limit: undecided until more requests tell."""
    suspect = StageCounts(compared=1000, disagreed=5)
    decision = decide(PLAN, SHADOW, [suspect], 60)
    found = evidence(decision, "disagreement")
    assert math.log(10) < found.log_e_value < -math.log(found.alpha)
    assert (decision.verdict, found.status) == (RolloutVerdict.HOLD, CriterionStatus.SUSPECT)
    assert decide(PLAN, SHADOW, [suspect], 600).verdict is RolloutVerdict.PAUSE
    assert "disagree" in decision.missing[0]
    more = StageCounts(compared=4000, disagreed=5)
    assert decide(PLAN, SHADOW, [more], 60).verdict is RolloutVerdict.ADVANCE


def test_the_reason_of_a_promotion_tells_absence_of_harm_from_proof() -> None:
    proven = {
        0: Attribution(9000, 30_000),
        P50: Attribution(2000, 10_000),
        P99: Attribution(500, 4000),
    }
    stages = [
        StageCounts(SideCounts(10**6), compared=10**5),
        canary(),
        canary(errors=Attribution(50, 400), ranks=proven),
        canary(),
    ]
    decision = decide(PLAN, ALL, stages, 60)
    kept = "disagreement, invalid, errors, latency"
    assert decision.reason == f"no limit is broken; proven to hold: {kept}"
    without_labels = plan(replace(PLAN.limits, max_quality_ratio=None))
    assert decide(without_labels, ALL, stages, 60).reason == "every limit is proven to hold"
    stages = [FLAWLESS, canary(), canary(), canary()]
    reason = decide(without_labels, ALL, stages, 60).reason
    assert reason == "no limit is broken; proven to hold: none"


def test_sticky_assignment_discounts_events_that_several_processes_may_have_counted() -> None:
    counts = canary(ranks={P99: Attribution(50, 120)}, sources=4)
    decision = decide(PLAN, QUARTER, [FLAWLESS, canary(), counts], 1)
    assert decision.verdict is RolloutVerdict.ROLLBACK
    sticky = plan(assignment=AssignmentKind.HEADER)
    decision = decide(sticky, QUARTER, [FLAWLESS, canary(), counts], 1)
    assert decision.verdict is RolloutVerdict.HOLD
    found = evidence(decision, "latency")
    candidate, baseline = np.zeros((2, RANKS))
    candidate[P99], baseline[P99] = 12.5, 17.5
    nothing = OutcomeCounts(1.0, 2 * RANKS * (0.0,))
    quarter = [nothing, nothing, OutcomeCounts(0.24 / 0.99, (*candidate, *baseline))]
    assert found.log_e_value == pytest.approx(log_e_value(quarter, LATENCY, stages=4))
    assert (found.part, found.events, found.trials) == ("p99", 50, 120)


def test_estimates_are_shares_or_multiples_of_the_baseline() -> None:
    counts = [
        StageCounts(SideCounts(1000), compared=1000, disagreed=2),
        canary(errors=Attribution(2, 101)),
        canary(ranks={P99: Attribution(40, 100)}),
    ]
    decision = decide(PLAN, QUARTER, counts, 1)
    assert evidence(decision, "disagreement").interval.estimate == pytest.approx(0.002)
    # 2 of 1 % against 99 of 99 %; 40 of 25 % against 60 of 75 %.
    assert evidence(decision, "errors").interval.estimate == pytest.approx(2)
    assert evidence(decision, "latency").interval.estimate == pytest.approx(2)
    for each in decision.criteria:
        estimate, lower, upper = each.interval
        if estimate is not None and lower is not None and upper is not None:
            assert lower <= estimate <= upper


def test_a_decision_computes_nothing_that_only_people_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made several times a second in the process that serves requests."""
    counts = [StageCounts(compared=1000, disagreed=1), canary(errors=Attribution(2, 101))]
    computed: list[Any] = []
    monkeypatch.setattr(evidence_module, "confidence_sequence", lambda *_: computed.append(_))
    decision = decide(PLAN, ONE_PERCENT, counts, 1)
    assert decision.verdict is RolloutVerdict.HOLD
    assert not computed
    decision.to_json()
    assert len(computed) == len(decision.criteria)


def test_a_decision_is_json_without_infinities() -> None:
    limits = replace(PLAN.limits, max_disagreement=0.0)
    counts = [StageCounts(compared=10, disagreed=10, failed=3)]
    document = json.dumps(decide(plan(limits), SHADOW, counts, 1).to_json(), allow_nan=False)
    assert json.loads(document)["verdict"] == "rollback"


def test_counts_travel_as_json_and_add_up() -> None:
    one = StageCounts(
        SideCounts(3, 1, {"p50_ms": 1}, {80: 2}, {3: 1}),
        SideCounts(2, 1),
        4,
        3,
        2,
        1,
        5,
        {11: Attribution(1, 2)},
        {"recall": Attribution(1, 3)},
        Attribution(1, 2),
        1,
    )
    assert StageCounts.from_json(json.loads(json.dumps(one.to_json()))) == one
    both = one + one
    assert both.errors == Attribution(2, 4)
    assert both.sources == 2
    assert both.ranks[11] == Attribution(2, 4)
    assert one + StageCounts() == one
