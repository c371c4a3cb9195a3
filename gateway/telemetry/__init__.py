"""What is measured: statistics per model version, Prometheus metrics, logs."""

from gateway.telemetry.collectors import TfServingRequests, TorchServeCollector, TritonCollector
from gateway.telemetry.conditions import ConditionsCollector
from gateway.telemetry.logs import configure_logging
from gateway.telemetry.statistics import FAILURE_REASONS, Statistics

__all__ = [
    "FAILURE_REASONS",
    "ConditionsCollector",
    "Statistics",
    "TfServingRequests",
    "TorchServeCollector",
    "TritonCollector",
    "configure_logging",
]
