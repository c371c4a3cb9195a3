"""``modelport top``: the models, rollouts and workers of a running gateway, at a glance."""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from modelport.gateway.cli import rollout_display
from modelport.gateway.cli.admin_client import DEFAULT_URL, AdminClient
from modelport.gateway.cli.server_credentials import credential_options
from modelport.gateway.cli.tables import print_table
from modelport.gateway.errors import UsageError
from modelport.gateway.runtime import terminal

#: With more versions there are no percentiles: a gateway writes their histograms for seconds.
MOST_DETAILED = 50
_LATENCY = "nv_inference_request_duration_histogram_us"
_HEAD = ("model", "version", "state", "req/s", "errors/s", "mean", "p50", "p99", "queue", "reason")
_COLOURS = {"READY": "green", "UNAVAILABLE": "red", "LOADING": "yellow", "UNLOADING": "yellow"}
#: Lines of the screen beside the versions.
_OTHER_LINES = 6
#: Model and version.
_Key = tuple[str, str]
#: Requests by upper bound, cumulative.
_Buckets = dict[float, float]


class _Look(NamedTuple):
    """The gateway at one moment."""

    at: float
    versions: Sequence[Mapping[str, str]]
    statistics: Mapping[_Key, Mapping[str, Any]]
    latencies: Mapping[_Key, _Buckets]
    families: Mapping[str, Metric]
    rollouts: Sequence[Mapping[str, Any]]


@click.command()
@click.argument("url", default=DEFAULT_URL)
@credential_options
@click.option("--once", is_flag=True, help="Print one table, of one interval, and end.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1, max=3600), default=2.0, show_default=True,
    help="Seconds between two looks.",
)  # fmt: skip
def top(url: str, once: bool, interval: float) -> None:
    """Watch the models, workers and rollouts of the gateway at URL, its metrics port.

    URL is http://localhost:8002 by default. Rates and latencies are those of the last interval.
    """
    if not once and not rollout_display.is_terminal():
        raise UsageError("the output is not a terminal; use --once")
    client = AdminClient(url, named="URL")
    before = _look(client)
    while True:
        time.sleep(interval)
        now = _look(client)
        if not once:
            click.clear()
        _show(client.url, before, now, None if once else shutil.get_terminal_size().lines)
        if once:
            return
        before = now


def _look(client: AdminClient) -> _Look:
    index = client.post("/v2/repository/index", {})
    entries = client.get("/v2/models/stats")["model_stats"]
    path = "/metrics" if len(index) <= MOST_DETAILED else "/metrics?model="
    families = {each.name: each for each in text_string_to_metric_families(client.text(path))}
    latencies: dict[_Key, _Buckets] = {}
    for sample in families[_LATENCY].samples if _LATENCY in families else ():
        if sample.name.endswith("_bucket"):
            labels = sample.labels
            key = labels["model"], labels["version"]
            latencies.setdefault(key, {})[float(labels["le"])] = sample.value
    statistics = {(each["name"], each["version"]): each["inference_stats"] for each in entries}
    rollouts = client.get("/v2/rollouts")
    return _Look(time.monotonic(), index, statistics, latencies, families, rollouts)


def _show(url: str, before: _Look, now: _Look, lines: int | None) -> None:
    seconds = max(now.at - before.at, 1e-9)
    rows = [_row(before, now, seconds, entry) for entry in now.versions]
    rows.sort(key=lambda row: (-row[0], row[1]))
    shown = [texts for _, texts in rows[: None if lines is None else max(1, lines - _OTHER_LINES)]]
    total = sum(rate for rate, _ in rows)
    used, limit = (
        _value(now, f"modelport_request_memory_{name}_bytes") / 2**20 for name in ("used", "limit")
    )
    ready, missing = (_value(now, "modelport_workers", state) for state in ("ready", "not_ready"))
    head = (
        f"{url}: {total:.4g} requests/s, {ready:g} of {ready + missing:g} workers ready, requests "
        f"use {used:,.0f} of {limit:,.0f} MiB"
    )
    click.secho(head, bold=not terminal.is_plain())
    print_table(_HEAD, shown, numbers=_HEAD[3:9], colours=_COLOURS)
    if len(shown) < len(rows):
        click.echo(f"… and {len(rows) - len(shown)} more")
    if now.rollouts:
        click.echo()
        rollout_display.show_all([*now.rollouts])


def _row(
    before: _Look, now: _Look, seconds: float, entry: Mapping[str, str]
) -> tuple[float, tuple[str, ...]]:
    """The rate of a version in the index, and the texts of its row."""
    key = entry["name"], entry.get("version", "")
    texts = (*key, entry.get("state", ""))
    current = now.statistics.get(key)
    if current is None:
        return 0.0, (*texts, *[""] * 6, entry.get("reason", ""))
    earlier = before.statistics.get(key, current)

    def grown(phase: str, field: str) -> int:
        """The growth of a counter in the interval; it is 0 if the gateway was started again."""
        return max(0, int(current[phase][field]) - int(earlier[phase][field]))

    def mean(phase: str) -> float:
        return grown(phase, "ns") / 1000 / answered if answered else math.nan

    answered = grown("success", "count")
    buckets = _grown(before.latencies.get(key, {}), now.latencies.get(key, {}))
    times = mean("success"), _quantile(buckets, 0.5), _quantile(buckets, 0.99), mean("queue")
    rates = answered / seconds, grown("fail", "count") / seconds
    figures = (*(f"{rate:.4g}" for rate in rates), *map(_time, times))
    return rates[0], (*texts, *figures, entry.get("reason", ""))


def _grown(before: _Buckets, now: _Buckets) -> _Buckets:
    return {bound: count - before.get(bound, 0.0) for bound, count in sorted(now.items())}


def _quantile(buckets: _Buckets, share: float) -> float:
    """A quantile of a histogram, linear within a bucket as in Prometheus; NaN if it is empty."""
    rank = share * max(buckets.values(), default=0.0)
    if not rank:
        return math.nan
    for (low, below), (high, count) in itertools.pairwise([(0.0, 0.0), *buckets.items()]):
        if count >= rank:
            inside = (rank - below) / (count - below)
            return low if math.isinf(high) else low + (high - low) * inside
    return math.nan


def _time(microseconds: float) -> str:
    if math.isnan(microseconds):
        return "-"
    if microseconds < 1000:
        return f"{microseconds:.3g} µs"
    return f"{microseconds / 1000:.3g} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.3g} s"


def _value(look: _Look, name: str, state: str | None = None) -> float:
    family = look.families.get(name)
    samples = () if family is None else family.samples
    return sum(s.value for s in samples if state is None or s.labels.get("state") == state)
