"""Prometheus metrics of rollouts, read from their statuses at scrape time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from modelport.gateway.rollout.plan import StageKind
from modelport.gateway.rollout.shared_state.state import RolloutPhase
from modelport.gateway.rollout.statistics.decision import RolloutVerdict

#: The statuses of all rollouts, as ``RolloutService.statuses`` returns them.
StatusesSource = Callable[[], list[dict[str, Any]]]

_SIDES = ("baseline", "candidate")
#: Counters over all stages: name, documentation, and the field of ``StageCounts``.
_COUNTERS = (
    ("modelport_rollout_compared_answers", "Pairs of answers that were compared", "compared"),
    ("modelport_rollout_disagreements", "Compared answers that disagree", "disagreed"),
    ("modelport_rollout_invalid_answers", "Disagreements caused by invalid outputs", "invalid"),
    ("modelport_rollout_failed_copies", "Copies that only the candidate failed", "failed"),
    ("modelport_rollout_dropped_copies", "Copies not sent to the candidate", "dropped"),
)


class RolloutCollector(Collector):
    """The metrics of the latest rollout of each model; none for models without one.

    Counters start at 0 for every rollout.
    """

    def __init__(self, statuses: StatusesSource) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        rows = [(status["plan"]["model"], status) for status in self._statuses()]
        yield _one_of(
            "modelport_rollout_phase", "The phase of the rollout", "phase", list(RolloutPhase),
            [(model, status["phase"]) for model, status in rows],
        )  # fmt: skip
        yield _one_of(
            "modelport_rollout_decision", "The current verdict", "verdict",
            list(RolloutVerdict),
            [(m, status["decision"]["verdict"]) for m, status in rows if "decision" in status],
        )  # fmt: skip
        stage = GaugeMetricFamily(
            "modelport_rollout_stage", "The stage of the rollout, counted from 1", labels=("model",)
        )
        share = GaugeMetricFamily(
            "modelport_rollout_candidate_share",
            "Share of the requests that the candidate answers (canary) or gets a copy of (shadow)",
            labels=("model", "kind"),
        )
        problem = GaugeMetricFamily(
            "modelport_rollout_problem",
            "Whether something blocks the rollout, such as a webhook or an unreachable repository",
            labels=("model",),
        )
        for model, status in rows:
            problem.add_metric((model,), bool(status["problem"]))
            stage.add_metric((model,), status["stage"] + 1)
            now = status["stages"][-1]["kind"] if status["stages"] else None
            for kind in StageKind:
                share.add_metric((model, kind), status["share"] if kind == now else 0.0)
        yield from (stage, share, problem)
        yield from _requests(rows)
        yield from _evidence(rows)


def _one_of(
    name: str, text: str, label: str, values: list[Any], rows: list[tuple[str, str]]
) -> Metric:
    """A gauge that is 1 for one value of ``label`` and 0 for the others."""
    family = GaugeMetricFamily(name, text, labels=("model", label))
    for model, current in rows:
        for value in values:
            family.add_metric((model, str(value).replace(" ", "_")), value == current)
    return family


def _requests(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "modelport_rollout_requests", "Requests by the side that answered", labels=("model", "side")
    )
    errors = CounterMetricFamily(
        "modelport_rollout_errors", "Failed requests by side", labels=("model", "side")
    )
    for model, status in rows:
        for side in _SIDES:
            stages = [stage[side] for stage in status["counts"]]
            requests.add_metric((model, side), sum(stage["requests"] for stage in stages))
            errors.add_metric((model, side), sum(stage["errors"] for stage in stages))
    yield from (requests, errors)
    for name, text, field in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=("model",))
        for model, status in rows:
            counter.add_metric((model,), sum(stage[field] for stage in status["counts"]))
        yield counter


def _evidence(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Metric]:
    log_e_value = GaugeMetricFamily(
        "modelport_rollout_log_e_value",
        "Natural logarithm of the evidence that the candidate breaks the limit of the criterion; "
        "it is broken at modelport_rollout_log_e_value_limit",
        labels=("model", "criterion"),
    )
    limit = GaugeMetricFamily(
        "modelport_rollout_log_e_value_limit",
        "Natural logarithm of the e-value from which the limit is broken",
        labels=("model", "criterion"),
    )
    estimate = GaugeMetricFamily(
        "modelport_rollout_estimate",
        "Estimate of the criterion: a share, or a multiple of the baseline's rate",
        labels=("model", "criterion"),
    )
    for model, status in rows:
        for criterion in status["evidence"]:
            key = (model, criterion["name"])
            log_e_value.add_metric(key, criterion["log_e_value"])
            limit.add_metric(key, -math.log(criterion["alpha"]))
            if criterion["estimate"] is not None:
                estimate.add_metric(key, criterion["estimate"])
    yield from (log_e_value, limit, estimate)
