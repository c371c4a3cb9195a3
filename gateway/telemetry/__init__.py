"""Telemetry: statistics per model version, Prometheus metrics and logs.

``metrics`` imports Prometheus' client, which only a scrape needs.
"""

from modelport.gateway.telemetry.logs import configure_logging
from modelport.gateway.telemetry.statistics import FAILURE_REASONS, Statistics

__all__ = ["FAILURE_REASONS", "Statistics", "configure_logging"]
