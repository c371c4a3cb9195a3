"""One answer of many, by itself: the pure functions of the hub."""

from __future__ import annotations

from itertools import chain
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry

from modelport.gateway.errors import Code
from modelport.gateway.server.admin import metrics_port
from modelport.gateway.server.workers import merged_answers
from modelport.gateway.server.workers.aggregated_metrics import AggregatedMetrics
from modelport.gateway.settings import MetricsChoice
from modelport.gateway.telemetry import Statistics
from modelport.gateway.telemetry.metrics import (
    FamiliesCollector,
    tfserving_families,
    torchserve_families,
    triton_families,
)
from modelport.gateway.telemetry.statistics import TraceExemplar
from modelport.gateway.telemetry.tfserving_counters import TfServingRequests
from modelport.gateway.types import Timing


def row(state: str, reason: str = "", version: str = "1", name: str = "m") -> dict[str, str]:
    return {"name": name, "version": version, "state": state, "reason": reason}


def counted(requests: int, batch: int = 2) -> Statistics:
    statistics = Statistics()
    for _ in range(requests):
        timing = Timing(compute_input_ns=1000, compute_infer_ns=2000, compute_output_ns=3000)
        statistics.succeeded(batch, 10_000, timing)
    statistics.failed(Code.INTERNAL, 500)
    return statistics


def report(statistics: Statistics, tfserving: int = 0) -> dict[str, Any]:
    """A worker's report to the coordinator, with one model."""
    requests = TfServingRequests()
    for _ in range(tfserving):
        requests.record("m", "Predict", "GRPC", "OK", 50_000)
    found = source(statistics)
    metrics = chain(
        triton_families(found, MetricsChoice()),
        torchserve_families(found),
        tfserving_families(requests),
    )
    families = merged_answers.families_json(metrics)
    return {"documents": [statistics.document("m", 1)], "families": families}


def source(statistics: Statistics) -> Any:
    return lambda: [("m", 1, statistics)]


def text(families: list[Any]) -> str:
    registry = CollectorRegistry()
    registry.register(FamiliesCollector(lambda: merged_answers.metrics(families)))
    return metrics_port.text(registry, False)[1].decode()


# -- the index ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([("READY", ""), ("READY", "")], ("READY", "")),
        ([("READY", ""), ("LOADING", "")], ("LOADING", "")),
        ([("READY", ""), ("UNAVAILABLE", "why")], ("UNAVAILABLE", "why (in 1 of 2 workers)")),
        ([("UNAVAILABLE", "why"), ("UNAVAILABLE", "why")], ("UNAVAILABLE", "why")),
        ([("UNLOADING", ""), ("UNAVAILABLE", "unloaded")], ("UNLOADING", "")),
        ([("READY", "reload failed"), ("READY", "")], ("READY", "reload failed")),
    ],
)
def test_a_version_is_ready_where_it_is_ready_in_every_worker(
    states: list[tuple[str, str]], expected: tuple[str, str]
) -> None:
    for order in (states, states[::-1]):
        (merged,) = merged_answers.index([[row(*state)] for state in order])
        assert (merged["state"], merged["reason"]) == expected


def test_a_version_that_one_worker_does_not_know_of_yet_is_loading() -> None:
    first, second = merged_answers.index(
        [[row("READY"), row("READY", version="2")], [row("READY")]]
    )
    assert (first["state"], second["state"], second["version"]) == ("READY", "LOADING", "2")


def test_a_model_without_versions_is_listed_once() -> None:
    problem = {"name": "m", "version": "", "state": "UNAVAILABLE", "reason": "no version"}
    assert merged_answers.index([[problem], [problem]]) == [problem]
    assert merged_answers.index([[{"name": "m"}], [{"name": "m"}]]) == [{"name": "m"}]


# -- counts ---------------------------------------------------------------------------------------


def test_documents_add_up_to_what_one_worker_would_have_counted() -> None:
    apart = [[counted(3).document("m", 1)], [counted(4).document("m", 1)]]
    (merged,) = merged_answers.documents(apart)
    together = counted(7)
    together.failed(Code.INTERNAL, 500)
    expected = together.document("m", 1)
    expected["last_inference"] = max(each[0]["last_inference"] for each in apart)
    assert merged == expected


def test_rows_of_executed_batches_are_matched_by_their_size() -> None:
    one, other = counted(1, batch=8).document("m", 1), counted(2, batch=16).document("m", 1)
    (merged,) = merged_answers.documents([[one], [other], [counted(1, batch=16).document("m", 1)]])
    sizes = [
        (entry["batch_size"], entry["compute_infer"]["count"]) for entry in merged["batch_stats"]
    ]
    assert sizes == [(8, 1), (16, 3)]


def test_the_sum_of_every_metric_family_equals_that_of_one_worker() -> None:
    together = counted(7)
    together.failed(Code.INTERNAL, 500)
    merged = merged_answers.families(
        [report(counted(3), tfserving=2)["families"], report(counted(4), tfserving=1)["families"]]
    )
    expected = text(report(together, tfserving=3)["families"])
    assert text(merged) == expected
    assert 'nv_inference_count{model="m",version="1"} 14\n' in expected


def test_no_count_goes_back_when_a_worker_is_lost_and_another_takes_its_place() -> None:
    counts = AggregatedMetrics()
    totals = []
    for step in ("both", "lost", "again"):
        if step == "both":
            counts.heard(0, report(counted(3), tfserving=1))
            counts.heard(1, report(counted(4), tfserving=2))
        elif step == "lost":
            counts.lost(1)
        else:
            counts.heard(1, report(counted(1), tfserving=0))
            counts.forget()
        (document,) = counts.documents()
        totals.append((document["inference_count"], text(counts.families())))
    assert [total for total, _ in totals] == [14, 14, 16]
    assert ':tensorflow:serving:request_count{model_name="m",status="OK"} 3\n' in totals[-1][1]
    assert 'nv_inference_request_success{model="m",version="1"} 8\n' in totals[-1][1]


def test_the_living_alone_would_count_less() -> None:
    """The known-bad variant: without what the lost worker had report the sum goes back."""
    assert merged_answers.documents([[counted(3).document("m", 1)]])[0]["inference_count"] == 6


def test_what_no_worker_has_any_more_is_forgotten_and_what_belongs_to_no_model_is_not() -> None:
    counts = AggregatedMetrics()
    counts.heard(0, report(counted(3), tfserving=1))
    counts.lost(0)
    counts.heard(0, {"documents": [], "families": []})
    counts.forget()
    assert counts.documents() == []
    assert "nv_inference_count{" not in text(counts.families())
    assert ":tensorflow:serving:request_count{" in text(counts.families())


def test_the_latest_exemplar_of_all_workers_is_kept() -> None:
    reports = []
    for number, at in enumerate((2.0, 3.0, 1.0)):
        statistics = Statistics()
        key = ("request", 0)
        statistics.exemplars[key] = TraceExemplar(f"{number:032x}", f"{number:016x}", 5.0, at)
        reports.append(orjson.loads(orjson.dumps(report(statistics)["families"])))
    merged = [*merged_answers.metrics(merged_answers.families([*reports, reports[0]]))]
    [kept] = [s for family in merged for s in family.samples if s.exemplar]
    assert (kept.exemplar.labels["trace_id"], kept.exemplar.timestamp) == (f"{1:032x}", 3.0)
