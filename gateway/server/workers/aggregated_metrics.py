"""Counts of all workers, including those that have ended, so that counters never decrease."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from modelport.gateway.server.workers import merged_answers
from modelport.gateway.server.workers.merged_answers import Family
from modelport.gateway.telemetry.metrics import IN_FLIGHT

Documents = list[dict[str, Any]]
_SUMMED = ("process_virtual_memory_bytes", "process_resident_memory_bytes", "process_open_fds")
_MODEL_LABELS = (("model", "version"), ("model_name", "model_version"))


class AggregatedMetrics:
    """The last report of each worker, and the sum of the reports of those that have ended."""

    def __init__(self) -> None:
        self._documents: dict[int, Documents] = {}
        self._families: dict[int, list[Family]] = {}
        self._gone_documents: Documents = []
        self._gone_families: list[Family] = []

    def heard(self, worker: int, report: Mapping[str, Any]) -> None:
        self._documents[worker] = report["documents"]
        self._families[worker] = report["families"]

    def lost(self, worker: int) -> None:
        """Keep the counts of a worker that has ended: its successor counts from 0."""
        documents = self._documents.pop(worker, [])
        families = merged_answers.lasting(self._families.pop(worker, []))
        self._gone_documents = merged_answers.documents([self._gone_documents, documents])
        self._gone_families = merged_answers.families([self._gone_families, families])

    def forget(self) -> None:
        """Drop the kept counts of versions that no worker has; every worker must have reported."""
        known = {
            (entry["name"], entry["version"])
            for documents in self._documents.values()
            for entry in documents
        }
        self._gone_documents = [
            entry for entry in self._gone_documents if (entry["name"], entry["version"]) in known
        ]
        for family in self._gone_families:
            family[3] = [
                sample for sample in family[3] if (version := _of(sample[1])) is None
                or version in known
            ]  # fmt: skip

    def documents(self) -> Documents:
        return merged_answers.documents([self._gone_documents, *self._documents.values()])

    def families(self, model: str | None = None) -> list[Family]:
        """Merge all families, in the order of the running workers.

        Args:
            model: Leave out the counters of the versions of other models.
        """
        answers = [*self._families.values(), self._gone_families]
        if model is not None:
            answers = [[_only(model, family) for family in each] for each in answers]
        return merged_answers.families(answers)


def _only(model: str, family: Family) -> Family:
    """The family without the counters of other models; the gateway's own are about all."""
    *head, samples = family
    if family[0].startswith("modelport_") and family[0] != IN_FLIGHT:
        return family
    return [*head, [sample for sample in samples if (_of(sample[1]) or (model,))[0] == model]]


def _of(labels: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the model and version in a sample's labels."""
    for model, version in _MODEL_LABELS:
        if model in labels and version in labels:
            return labels[model], labels[version]
    return None


def process_families(pids: Iterable[int]) -> Iterable[Metric]:
    """Sum the ``process_*`` families of ``prometheus_client`` over the gateway's processes.

    The processor time includes that of workers which have ended.
    """
    summed: dict[str, Metric] = {}
    for pid in pids:
        for family in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():  # type: ignore[misc]
            if family.name not in summed:
                summed[family.name] = family  # the parent's: its start time is the gateway's
            elif family.name in _SUMMED or family.type == "counter":
                mine, more = summed[family.name].samples[0], family.samples[0]
                summed[family.name].samples[0] = mine._replace(value=mine.value + more.value)
    cpu = summed.get("process_cpu_seconds")
    if cpu is not None:
        sample, ended = cpu.samples[0], resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = sample.value + ended.ru_utime + ended.ru_stime
        cpu.samples[0] = sample._replace(value=seconds)
    return summed.values()
