"""Tests of the statistics document and of the metrics, read with Prometheus' parser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from modelport.gateway.access.operations import Operation
from modelport.gateway.access.policy import AccessPolicy, Rule
from modelport.gateway.access.principal import Principal
from modelport.gateway.errors import Code
from modelport.gateway.server.admin import metrics_port
from modelport.gateway.telemetry import FAILURE_REASONS, Statistics
from modelport.gateway.telemetry.statistics import PHASE_BUCKETS_US, PHASES
from modelport.gateway.types import Timing
from tests import models
from tests.server import Gateway, serving

COUNTERS = (
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
)
HISTOGRAM = "nv_inference_first_response_histogram_ms"
PENDING = "nv_inference_pending_request_count"
DURATIONS = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)


# -- the statistics document ----------------------------------------------------------------------


def test_every_key_is_there_before_the_first_request() -> None:
    document = Statistics().document("m", 3)
    assert document["name"] == "m"
    assert document["version"] == "3"
    for key in ("last_inference", "inference_count", "execution_count"):
        assert document[key] == 0
    assert document["inference_stats"] == {key: {"count": 0, "ns": 0} for key in DURATIONS}
    assert document["batch_stats"] == []


def test_a_success_counts_batch_elements_executions_and_nanoseconds() -> None:
    statistics = Statistics()
    before = time.time_ns() // 1_000_000
    statistics.succeeded(3, 100, Timing(1, 2, 3, 4))
    statistics.succeeded(1, 50, Timing(10, 20, 30, 40))
    document = statistics.document("m", 1)
    assert before <= document["last_inference"] <= time.time_ns() // 1_000_000
    assert (document["inference_count"], document["execution_count"]) == (4, 2)
    stats = document["inference_stats"]
    assert stats["success"] == {"count": 2, "ns": 150}
    assert stats["queue"] == {"count": 2, "ns": 11}
    assert stats["compute_input"] == {"count": 2, "ns": 22}
    assert stats["compute_infer"] == {"count": 2, "ns": 33}
    assert stats["compute_output"] == {"count": 2, "ns": 44}
    assert stats["fail"] == {"count": 0, "ns": 0}
    assert [(b["batch_size"], b["compute_infer"]) for b in document["batch_stats"]] == [
        (1, {"count": 1, "ns": 30}),
        (3, {"count": 1, "ns": 3}),
    ]


def test_requests_that_ran_together_are_one_execution_of_the_batchs_size() -> None:
    statistics = Statistics()
    statistics.executed(3, Timing(0, 2, 30, 4))
    for batch in (1, 2):
        statistics.succeeded(batch, 100, Timing(1, 2, 30, 4, counted=True))
    document = statistics.document("m", 1)
    assert (document["inference_count"], document["execution_count"]) == (3, 1)
    assert document["inference_stats"]["compute_infer"] == {"count": 2, "ns": 60}
    assert [(b["batch_size"], b["compute_infer"]) for b in document["batch_stats"]] == [
        (3, {"count": 1, "ns": 30})
    ]


def test_an_answer_from_the_cache_is_a_success_and_neither_an_inference_nor_an_execution() -> None:
    statistics = Statistics()
    statistics.succeeded(4, 100, Timing(cache_hit_ns=7))
    statistics.succeeded(2, 100, Timing(compute_infer_ns=5, cache_miss_ns=9))
    document = statistics.document("m", 1)
    assert (document["inference_count"], document["execution_count"]) == (2, 1)
    stats = document["inference_stats"]
    assert [stats[key] for key in ("success", "cache_hit", "cache_miss", "compute_infer")] == [
        {"count": 2, "ns": 200},
        {"count": 1, "ns": 7},
        {"count": 1, "ns": 9},
        {"count": 1, "ns": 5},
    ]
    assert [b["batch_size"] for b in document["batch_stats"]] == [2]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (Code.UNAVAILABLE, "REJECTED"),
        (Code.CANCELLED, "CANCELED"),
        (Code.INTERNAL, "BACKEND"),
        (Code.INVALID_ARGUMENT, "OTHER"),
        (Code.NOT_FOUND, "OTHER"),
    ],
)
def test_a_failure_is_counted_by_its_reason_and_nowhere_else(code: Code, reason: str) -> None:
    statistics = Statistics()
    statistics.failed(code, 7)
    assert statistics.failures == {r: int(r == reason) for r in FAILURE_REASONS}
    document = statistics.document("m", 1)
    assert document["inference_stats"]["fail"] == {"count": 1, "ns": 7}
    assert document["inference_count"] == document["execution_count"] == 0


@pytest.mark.parametrize(
    ("ms", "bucket"), [(0, 0), (100, 0), (100.001, 1), (500, 1), (2000, 2), (5000, 3), (5001, 4)]
)
def test_a_first_response_falls_into_the_bucket_whose_bound_it_does_not_exceed(
    ms: float, bucket: int
) -> None:
    statistics = Statistics()
    statistics.succeeded(1, int(ms * 1e6), Timing())
    assert statistics.first_response.index(1) == bucket
    assert statistics.first_response_ns == int(ms * 1e6)


@pytest.mark.parametrize("bound_us", PHASE_BUCKETS_US)
@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_falls_into_the_bucket_whose_bound_it_does_not_exceed(
    phase: str, bound_us: int
) -> None:
    statistics = Statistics()
    for ns in (bound_us * 1000, bound_us * 1000 + 1):
        total = ns if phase == "request" else 0
        spent = {} if phase == "request" else {f"{phase}_ns": ns}
        statistics.succeeded(1, total, Timing(**spent))
    index = PHASE_BUCKETS_US.index(bound_us)
    assert statistics.phases[phase][index : index + 2] == [1, 1]
    assert {sum(counts) for counts in statistics.phases.values()} == {2}


def test_a_stream_counts_as_a_whole_request() -> None:
    statistics = Statistics()
    statistics.succeeded(1, 3_000_000_000, Timing(), streamed=True)
    assert statistics.phases["request"][PHASE_BUCKETS_US.index(5_000_000)] == 1


# -- a real scrape --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = models.repository(tmp_path_factory.mktemp("repository"))
    failing = root / "failing" / "config.pbtxt"
    failing.parent.mkdir()
    (root / "failing" / "1").mkdir()
    failing.write_text(
        models.X2_CONFIG.replace('"x2"', '"failing"').replace('"onnxruntime"', '"fake"')
        + 'parameters { key: "error" value { string_value: "no" } }'
    )
    with serving(root) as running:
        yield running


def infer(gateway: Gateway, model: str = "x2", batch: int = 1, size: int = 4) -> int:
    body = {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [batch, size], "data": [1] * batch * size}
        ]
    }
    url = f"http://{gateway.http}/v2/models/{model}/infer"
    return httpx.post(url, json=body).status_code


def families(gateway: Gateway) -> dict[str, Metric]:
    reply = httpx.get(gateway.metrics)
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(reply.text)}


def value(found: dict[str, Metric], name: str, **labels: str) -> float:
    """The only sample called ``name``; the parser adds the ``_total`` that the text has not."""
    samples = [
        sample.value
        for family in found.values()
        for sample in family.samples
        if sample.name in (name, f"{name}_total") and labels.items() <= sample.labels.items()
    ]
    (only,) = samples
    return only


def test_openmetrics_is_valid_and_has_the_same_samples(gateway: Gateway) -> None:
    infer(gateway)
    infer(gateway, "failing")
    reply = httpx.get(gateway.metrics, headers={"accept": "application/openmetrics-text"})
    assert reply.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert reply.text.endswith("# EOF\n")
    found = [*openmetrics.text_string_to_metric_families(reply.text)]
    kinds = {family.name: family.type for family in found}
    assert kinds[HISTOGRAM] == "histogram"
    assert kinds["nv_inference_count"] == "unknown"  # a counter's samples end in _total
    assert kinds["ts_inference_requests"] == "counter"
    text = httpx.get(gateway.metrics).text
    assert samples_of(found) == samples_of(text_string_to_metric_families(text))


def samples_of(found: Iterable[Metric]) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Names and labels; the text's parser adds a ``_total`` that the text has not."""
    return {
        (
            sample.name.removesuffix("_total"),
            frozenset((k, str(float(v)) if k == "le" else v) for k, v in sample.labels.items()),
        )
        for family in found
        for sample in family.samples
    }


def test_the_names_and_types_are_tritons(gateway: Gateway) -> None:
    found = families(gateway)
    for name in COUNTERS:
        assert found[name].type == "counter", name
        assert len(found[name].samples) >= 2, f"{name} has no sample per model"
    assert found[PENDING].type == "gauge"
    assert found[HISTOGRAM].type == "histogram"


def test_no_counter_of_tritons_names_ends_in_total(gateway: Gateway) -> None:
    text = httpx.get(gateway.metrics).text
    assert "nv_inference" in text
    assert not [line for line in text.splitlines() if re.match(r"nv_\w*_total\b", line)]
    assert not [line for line in text.splitlines() if line.startswith("# ") and "_total nv" in line]


def test_every_sample_names_its_model_and_version(gateway: Gateway) -> None:
    for family in families(gateway).values():
        for sample in family.samples:
            if sample.name.startswith("nv_inference"):
                assert {"model", "version"} <= sample.labels.keys(), sample


def test_a_request_moves_what_it_should_and_nothing_else(gateway: Gateway) -> None:
    before = families(gateway)
    assert infer(gateway, batch=3) == 200
    after = families(gateway)
    moved = {
        "nv_inference_request_success": 1,
        "nv_inference_count": 3,
        "nv_inference_exec_count": 1,
    }
    for name, step in moved.items():
        delta = value(after, name, model="x2", version="1") - value(before, name, model="x2")
        assert delta == step, name
    for name in COUNTERS:
        if name != "nv_inference_request_failure":
            assert value(after, name, model="failing") == value(before, name, model="failing")
    for name in ("nv_inference_request_duration_us", "nv_inference_compute_infer_duration_us"):
        assert value(after, name, model="x2") > value(before, name, model="x2")
    assert value(after, PENDING, model="x2") == 0


def test_the_histogram_is_cumulative_and_counts_every_success(gateway: Gateway) -> None:
    assert infer(gateway) == 200
    found = families(gateway)
    buckets = [
        (sample.labels["le"], sample.value)
        for sample in found[HISTOGRAM].samples
        if sample.name == f"{HISTOGRAM}_bucket" and sample.labels["model"] == "x2"
    ]
    assert [bound for bound, _ in buckets] == ["100", "500", "2000", "5000", "+Inf"]
    counts = [count for _, count in buckets]
    assert counts == sorted(counts)
    successes = value(found, "nv_inference_request_success", model="x2")
    assert counts[-1] == value(found, f"{HISTOGRAM}_count", model="x2") == successes


@pytest.mark.parametrize(
    ("model", "size", "reason"), [("failing", 4, "BACKEND"), ("x2", 5, "OTHER")]
)
def test_a_failure_is_counted_with_its_reason(
    gateway: Gateway, model: str, size: int, reason: str
) -> None:
    name = "nv_inference_request_failure"
    before = families(gateway)
    assert infer(gateway, model, size=size) >= 400
    after = families(gateway)
    for other in FAILURE_REASONS:
        delta = value(after, name, model=model, reason=other) - value(
            before, name, model=model, reason=other
        )
        assert delta == (other == reason), other


def test_the_processs_memory_is_there_to_watch(gateway: Gateway) -> None:
    assert value(families(gateway), "process_resident_memory_bytes") > 1e6


def test_who_may_see_some_versions_sees_their_samples_only() -> None:
    models = ("m", '6" disk')
    allowed = (
        AccessPolicy([Rule(("ci",), frozenset({Operation.METRICS}), models, frozenset({"1"}), 1)])
        .rights(Principal("ci"))
        .by_operation[Operation.METRICS]
        .versions
    )
    shown = {
        b'a{model="m",version="1"} 1.0': True,
        b'a{model="m",version="2"} 1.0': False,
        b'modelport_rollout_phase{model="m",phase="running"} 1.0': False,
        b'a{model="other",version="1"} 1.0': False,
        b'a{model="6\\" disk",version="1"} 1.0': True,
        b"process_cpu_seconds_total 1.0": True,
    }
    assert {line: metrics_port._shows(line, allowed) for line in shown} == shown


def test_the_metrics_port_serves_metrics_and_the_console_and_nothing_else(
    gateway: Gateway,
) -> None:
    for path in (
        "/",
        "/metrics/",
        "/v1/models",
        "/models",
        "/consoles",
        "/console/none.js",
        "/docs",
    ):
        assert httpx.get(f"http://127.0.0.1:{gateway.metrics_port}{path}").status_code == 404
    assert httpx.get(f"http://{gateway.http}/metrics").status_code == 404


def test_the_statistics_endpoint_agrees_with_the_metrics(gateway: Gateway) -> None:
    stats = httpx.get(f"http://{gateway.http}/v2/models/x2/stats").json()["model_stats"][0]
    found = families(gateway)
    assert stats["inference_count"] == value(found, "nv_inference_count", model="x2")
    assert stats["execution_count"] == value(found, "nv_inference_exec_count", model="x2")
    assert stats["inference_stats"].keys() == set(DURATIONS)


# -- logs -----------------------------------------------------------------------------------------

LOG = """
import logging
from modelport.gateway.settings import LogFormat
from modelport.gateway.telemetry import configure_logging
import structlog
configure_logging(LogFormat("{form}"), {verbose})
structlog.get_logger("a").info("hello", model="m")
structlog.get_logger("a").debug("whisper")
logging.getLogger("library").warning("from a library")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger("a").exception("broken")
    logging.getLogger("library").exception("a library broke")
"""


def logged(form: str, verbose: int) -> list[str]:
    code = LOG.format(form=form, verbose=verbose)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == ""
    return run.stderr.splitlines()


def test_json_logs_are_one_object_a_line_tracebacks_and_libraries_included() -> None:
    entries: list[dict[str, Any]] = [json.loads(line) for line in logged("json", 0)]
    events = [entry["event"] for entry in entries]
    assert events == ["hello", "from a library", "broken", "a library broke"]
    assert entries[0]["model"] == "m"
    assert entries[0]["level"] == "info"
    assert entries[0]["timestamp"].endswith("Z")
    assert "ZeroDivisionError" in entries[2]["exception"]


def test_json_logs_hold_a_librarys_traceback_as_readable_text() -> None:
    (entry,) = [e for e in map(json.loads, logged("json", 0)) if e["event"] == "a library broke"]
    assert entry["exception"].startswith("Traceback (most recent call last):\n")
    assert entry["exception"].endswith("ZeroDivisionError: division by zero")
    assert "exc_info" not in entry
    assert entry["level"] == "error"


def test_verbose_logs_hold_more() -> None:
    assert any("whisper" in line for line in logged("default", 1))
    assert not any("whisper" in line for line in logged("default", 0))


def test_no_colours_are_written_where_there_is_no_terminal() -> None:
    for form in ("default", "ISO8601"):
        assert "\x1b[" not in "\n".join(logged(form, 1))
