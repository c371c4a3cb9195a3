"""``--metrics-config``, buckets of a model's own, and the metrics of the machine."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import click
import pytest
from prometheus_client import CollectorRegistry

from modelport.gateway.cli.serve import settings_of
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.models.model_config import FIRST_RESPONSE, histogram_buckets
from modelport.gateway.repository import config as configuration
from modelport.gateway.server.admin import metrics_port
from modelport.gateway.settings import MetricsChoice
from modelport.gateway.telemetry import machine
from modelport.gateway.telemetry.machine import MachineCollector
from modelport.gateway.telemetry.metrics import FamiliesCollector, triton_families
from modelport.gateway.telemetry.statistics import FIRST_RESPONSE_BUCKETS_MS, Statistics
from modelport.gateway.telemetry.summaries import SLOT_SECONDS, SLOTS, SlidingQuantiles
from modelport.gateway.types import Timing

MILLISECOND = 1_000_000
COUNTERS = {"request", "queue", "compute_input", "compute_infer", "compute_output"}
CACHE = {f"nv_cache_{kind}_duration_per_model" for kind in ("hit", "miss")}


def text(chosen: MetricsChoice, cached: bool = False) -> str:
    """A scrape of a version that has answered once, in 3 ms, of which 1 ms in the queue."""
    statistics = Statistics(summarized=chosen.summary_latencies)
    statistics.cached = cached
    timing = Timing(queue_ns=MILLISECOND, cache_miss_ns=cached * 1000)
    statistics.succeeded(1, 3 * MILLISECOND, timing)
    registry = CollectorRegistry()
    rows = [("m", 1, statistics)]
    registry.register(FamiliesCollector(lambda: triton_families(lambda: rows, chosen)))
    return metrics_port.text(registry, False)[1].decode()


def names(found: str) -> set[str]:
    return {line.split("{")[0] for line in found.splitlines() if not line.startswith("#")}


@pytest.mark.parametrize("cached", [False, True])
def test_each_setting_adds_or_removes_exactly_its_metrics(cached: bool) -> None:
    default = names(text(MetricsChoice(), cached))
    durations = {f"nv_inference_{kind}_duration_us" for kind in COUNTERS}
    if cached:
        durations |= CACHE
    phases = {
        f"nv_inference_{kind}_duration_histogram_us_{part}"
        for kind in COUNTERS
        for part in ("bucket", "count", "sum")
    }
    off = default - names(text(MetricsChoice(counter_latencies=False), cached))
    assert off == durations | phases
    parts = phases | {f"{FIRST_RESPONSE}_{part}" for part in ("bucket", "count", "sum")}
    assert default - names(text(MetricsChoice(histogram_latencies=False), cached)) == parts
    kinds = {f"inference_{kind}" for kind in COUNTERS}
    if cached:  # as in Triton
        kinds = kinds - {"inference_request"} | {"cache_hit", "cache_miss"}
    summaries = {
        f"nv_{kind}_summary_us" + part for kind in kinds for part in ("", "_count", "_sum")
    }
    assert names(text(MetricsChoice(summary_latencies=True), cached)) - default == summaries
    assert bool(CACHE & default) is cached


def test_a_summary_has_quantiles_count_and_sum() -> None:
    found = text(MetricsChoice(summary_latencies=True, summary_quantiles=(0.5, 0.999)))
    for quantile in ("0.5", "0.999"):
        (value,) = re.findall(rf'queue_summary_us{{.*quantile="{quantile}".*}} (.*)', found)
        assert float(value) == pytest.approx(1000, rel=0.01)
    labels = '{model="m",version="1"}'
    assert f"nv_inference_queue_summary_us_sum{labels} 1000\n" in found
    assert f"nv_inference_queue_summary_us_count{labels} 1\n" in found
    assert f'{FIRST_RESPONSE}_bucket{{model="m",version="1",le="100"}} 1\n' in found


def test_quantiles_are_those_of_the_last_minute_within_one_percent() -> None:
    source = random.Random(7)
    values = [source.lognormvariate(10, 2) for _ in range(2000)]
    quantiles = SlidingQuantiles()
    for _ in range(500):
        quantiles.add(10**12, now=0.0)  # long ago
    for place, value in enumerate(values):
        quantiles.add(int(value * 1000), now=100.0 + place / 1000)
    ordered = sorted(values)
    wanted = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
    for share, found in zip(wanted, quantiles.quantiles(wanted, now=110.0), strict=True):
        rank = max(1, math.ceil(share * len(ordered)))
        assert found == pytest.approx(ordered[rank - 1], rel=0.011)
    assert quantiles.count == 2500
    later = 110.0 + SLOT_SECONDS * SLOTS
    assert all(math.isnan(found) for found in quantiles.quantiles(wanted, now=later))


def test_whole_numbers_are_written_as_triton_does() -> None:
    samples = b"a 3.0\nb 1.5e+09\nc 0.25\nd NaN\ne 1e-05\n# HELP f of 2.0\nf 2.5e+20\n"
    written = metrics_port._WHOLE.sub(metrics_port._as_integer, samples)
    expected = b"a 3\nb 1500000000\nc 0.25\nd NaN\ne 1e-05\n# HELP f of 2.0\nf 2.5e+20\n"
    assert written == expected


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["latencies=true"], "there is no setting 'latencies'; use one of: counter_latencies"),
        (["summary_latencies=yes"], "'summary_latencies=yes': the value is not true or false"),
        (["summary_quantiles=2:0.1"], "'2:0.1' is not QUANTILE:ERROR"),
        (["summary_quantiles=0.5"], "'0.5' is not QUANTILE:ERROR"),
    ],
)
def test_a_wrong_choice_is_told_in_one_line(tmp_path: Path, flags: list[str], told: str) -> None:
    arguments = [part for flag in flags for part in ("--metrics-config", flag)]
    with pytest.raises(click.BadParameter, match=re.escape(told)):
        settings_of(["--model-repository", str(tmp_path), *arguments])


def test_the_settings_have_the_choice_and_workers_have_no_quantiles(tmp_path: Path) -> None:
    flags = ["summary_latencies=true", "summary_quantiles=0.5:0.05,0.9:0.01"]
    arguments = ["--model-repository", str(tmp_path)]
    arguments += [part for flag in flags for part in ("--metrics-config", flag)]
    chosen = settings_of(arguments).metrics
    assert chosen == MetricsChoice(summary_latencies=True, summary_quantiles=(0.5, 0.9))
    with pytest.raises(click.UsageError, match="needs --workers 1"):
        settings_of([*arguments, "--workers", "2"])


def _with_buckets(family: str, buckets: str) -> str:
    return (
        f'model_metrics {{ metric_control {{ metric_identifier {{ family: "{family}" }} '
        f"histogram_options {{ buckets: [{buckets}] }} }} }}"
    )


def test_a_model_declares_the_buckets_of_its_first_responses() -> None:
    config = configuration.parse(_with_buckets(FIRST_RESPONSE, "-1, 0, 2.5"))
    bounds = histogram_buckets(config)
    statistics = Statistics(bounds)
    statistics.succeeded(1, 2 * MILLISECOND, Timing())
    assert statistics.first_response == [0, 0, 1, 0]
    assert histogram_buckets(configuration.parse("")) == FIRST_RESPONSE_BUCKETS_MS
    for family, buckets in (
        ("nv_inference_count", "1"),
        *((FIRST_RESPONSE, wrong) for wrong in ("", "1, 1", "2, 1", "nan", "1, inf")),
        (FIRST_RESPONSE, ", ".join(map(str, range(65)))),
    ):
        with pytest.raises(InvalidArgument, match="buckets of"):
            histogram_buckets(configuration.parse(_with_buckets(family, buckets)))


@pytest.mark.parametrize("content", ["", "cpu", "cpu a b c d e", None])
def test_a_hidden_file_of_the_machine_costs_its_metrics_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    for name in ("_STAT", "_MEMORY"):
        file = tmp_path / name
        if content is not None:
            file.write_text(content)
        with monkeypatch.context() as patch:
            patch.setattr(machine, name, file)
            assert list(MachineCollector().collect()) == []


def test_the_machine_has_a_utilization_and_memory() -> None:
    collector = MachineCollector()
    for _ in range(2):  # the second within the same tick keeps the first one's utilization
        found = {family.name: family.samples[0].value for family in collector.collect()}
        assert 0 <= found["nv_cpu_utilization"] <= 1
        assert 0 < found["nv_cpu_memory_used_bytes"] <= found["nv_cpu_memory_total_bytes"]
