"""All metrics of one process, read from what it counts at scrape time."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector

from modelport.gateway.telemetry.collectors import (
    RequestMemoryCollector,
    RequestMemoryUse,
    StatisticsSource,
    TfServingCollector,
    TorchServeCollector,
    TritonCollector,
)
from modelport.gateway.telemetry.conditions import Conditions, ConditionsCollector
from modelport.gateway.telemetry.tfserving import TfServingRequests


def registry(
    statistics: StatisticsSource,
    requests: TfServingRequests,
    conditions: Conditions,
    memory: RequestMemoryUse,
    process: bool,
) -> CollectorRegistry:
    """``process``: the operating system's figures of this process too."""
    made = CollectorRegistry()
    for collector in (
        TritonCollector(statistics),
        TorchServeCollector(statistics),
        TfServingCollector(requests),
        ConditionsCollector(conditions),
        RequestMemoryCollector(memory),
    ):
        made.register(collector)
    if process:
        ProcessCollector(registry=made)
    return made
