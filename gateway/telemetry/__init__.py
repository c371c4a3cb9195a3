"""Telemetry: statistics per model version, Prometheus metrics and logs.

To add a metric, count it in ``statistics`` and give it a name in ``metrics``; the
values of several workers are added up by ``server.workers.aggregated_metrics``.

``metrics`` imports Prometheus' client, which only a scrape needs.
"""

from modelport.gateway.telemetry.logs import configure_logging
from modelport.gateway.telemetry.statistics import FAILURE_REASONS, Statistics

__all__ = ["FAILURE_REASONS", "Statistics", "configure_logging"]
