"""Metrics of access."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from modelport.gateway.access.access import Access
from modelport.gateway.access.audit import AuditLog
from modelport.gateway.runtime.file_watcher import FileWatcher

ERRORS = "modelport_access_reload_errors"


class AccessCollector(Collector):
    """Counts the file changes that were rejected, and adds the authenticators' metrics."""

    def __init__(self, watcher: FileWatcher, access: Access) -> None:
        self._watcher, self._access = watcher, access

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            ERRORS, "Changed files with errors; their old content stays in use", labels=("file",)
        )
        for name, errors in sorted(self._watcher.errors.items()):
            family.add_metric((name,), errors)
        yield family
        yield from self._access.metrics()


class AuditCollector(Collector):
    """Counts the events that are missing in the audit log."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "modelport_audit_dropped",
            "Events missing from the audit log because the disk was full or slow",
            value=self._audit.dropped,
        )
