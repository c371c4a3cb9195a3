"""The metrics of rollouts, as Prometheus reads them."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from modelport.gateway.rollout.rollout_metrics import RolloutCollector
from modelport.gateway.rollout.shared_state.transitions import Change, started
from modelport.gateway.rollout.statistics.counts import SideCounts, StageCounts
from modelport.gateway.rollout.statistics.decision import decide
from tests.gateway.rollout.plans import plan


def status(counts: StageCounts, **more: Any) -> dict[str, Any]:
    """The status of a rollout in its first stage, a shadow of 10 %."""
    state = started(plan(shadow=0.1), None, "0" * 32, Change(1.0))
    decision = decide(state.plan, 0, [counts], 1.0).to_json()
    return (
        state.to_json()
        | {"share": 0.1, "problem": "", "decision": decision, "evidence": decision["criteria"]}
        | {"counts": [counts.to_json()]}
        | more
    )


def metrics(*statuses: dict[str, Any]) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(RolloutCollector(lambda: list(statuses)))
    lines = generate_latest(registry).decode().splitlines()
    values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in values}


def test_a_gateway_without_rollouts_has_no_metrics_of_them() -> None:
    assert metrics() == {}


def test_the_metrics_tell_phase_stage_share_and_verdict() -> None:
    found = metrics(status(StageCounts(compared=1000, disagreed=30)))
    assert found['modelport_rollout_phase{model="fraud",phase="running"}'] == 1
    assert found['modelport_rollout_phase{model="fraud",phase="rolled_back"}'] == 0
    assert found['modelport_rollout_decision{model="fraud",verdict="rollback"}'] == 1
    assert found['modelport_rollout_stage{model="fraud"}'] == 1
    assert found['modelport_rollout_candidate_share{kind="shadow",model="fraud"}'] == 0.1
    assert found['modelport_rollout_candidate_share{kind="canary",model="fraud"}'] == 0
    assert found['modelport_rollout_problem{model="fraud"}'] == 0


def test_counters_are_those_of_all_stages() -> None:
    counts = StageCounts(SideCounts(7, 1), SideCounts(3, 2), 20, 4, 3, 2, 1)
    both = status(counts) | {"counts": [counts.to_json(), counts.to_json()]}
    found = metrics(both)
    assert found['modelport_rollout_requests_total{model="fraud",side="baseline"}'] == 14
    assert found['modelport_rollout_errors_total{model="fraud",side="candidate"}'] == 4
    assert found['modelport_rollout_compared_answers_total{model="fraud"}'] == 40
    assert found['modelport_rollout_disagreements_total{model="fraud"}'] == 8
    assert found['modelport_rollout_invalid_answers_total{model="fraud"}'] == 6
    assert found['modelport_rollout_failed_copies_total{model="fraud"}'] == 4
    assert found['modelport_rollout_dropped_copies_total{model="fraud"}'] == 2


def test_the_evidence_passes_its_limit_when_the_candidate_is_rolled_back() -> None:
    labels = '{criterion="disagreement",model="fraud"}'
    harmful = metrics(status(StageCounts(compared=1000, disagreed=30)))
    harmless = metrics(status(StageCounts(compared=1000, disagreed=0)))
    limit = f"modelport_rollout_log_e_value_limit{labels}"
    assert harmful[f"modelport_rollout_log_e_value{labels}"] >= harmful[limit]
    assert harmless[f"modelport_rollout_log_e_value{labels}"] < harmless[limit]
    assert harmless[f"modelport_rollout_estimate{labels}"] < 0.001


def test_an_ended_rollout_and_one_that_cannot_be_followed_are_told() -> None:
    ended = status(StageCounts(), phase="rolled back", problem="the state is out of date")
    del ended["decision"]
    found = metrics(ended)
    assert found['modelport_rollout_phase{model="fraud",phase="rolled_back"}'] == 1
    assert found['modelport_rollout_problem{model="fraud"}'] == 1
    assert not any(name.startswith("modelport_rollout_decision") for name in found)
