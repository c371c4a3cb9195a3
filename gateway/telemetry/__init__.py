"""What is measured: statistics per model version, Prometheus metrics, logs.

The metrics' modules (``registry``, ``collectors``, ``conditions``) bring Prometheus' client, which
nothing needs before the first scrape.
"""

from modelport.gateway.telemetry.logs import configure_logging
from modelport.gateway.telemetry.statistics import FAILURE_REASONS, Statistics

__all__ = ["FAILURE_REASONS", "Statistics", "configure_logging"]
