"""What the workers have counted, those that are gone included: it never goes backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from modelport.gateway.server.workers import merge
from modelport.gateway.server.workers.merge import Family

Documents = list[dict[str, Any]]
_SUMMED = ("process_virtual_memory_bytes", "process_resident_memory_bytes", "process_open_fds")
_MODEL_LABELS = (("model", "version"), ("model_name", "model_version"))


class Counts:
    """The last that each worker has told, and the sum of what those that are gone had told."""

    def __init__(self) -> None:
        self._documents: dict[int, Documents] = {}
        self._families: dict[int, list[Family]] = {}
        self._gone_documents: Documents = []
        self._gone_families: list[Family] = []

    def heard(self, worker: int, told: Mapping[str, Any]) -> None:
        self._documents[worker] = told["documents"]
        self._families[worker] = told["families"]

    def lost(self, worker: int) -> None:
        """The worker is gone; the one that takes its place counts from 0."""
        documents = self._documents.pop(worker, [])
        families = merge.lasting(self._families.pop(worker, []))
        self._gone_documents = merge.documents([self._gone_documents, documents])
        self._gone_families = merge.families([self._gone_families, families])

    def forget(self) -> None:
        """Drop what was counted of versions that no worker has any more; all must have told."""
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
        return merge.documents([self._gone_documents, *self._documents.values()])

    def families(self) -> list[Family]:
        """Families of the living come first: the order is theirs."""
        return merge.families([*self._families.values(), self._gone_families])


def _of(labels: Mapping[str, str]) -> tuple[str, str] | None:
    """The model version that a sample is about."""
    for model, version in _MODEL_LABELS:
        if model in labels and version in labels:
            return labels[model], labels[version]
    return None


class ProcessesCollector(Collector):
    """The library's ``process_*`` families, of all processes of the gateway together.

    ``ended_cpu_seconds`` is the time that those took which have ended.
    """

    def __init__(
        self, pids: Callable[[], Iterable[int]], ended_cpu_seconds: Callable[[], float]
    ) -> None:
        self._pids = pids
        self._ended_cpu_seconds = ended_cpu_seconds

    def collect(self) -> Iterable[Metric]:
        summed: dict[str, Metric] = {}
        for pid in self._pids():
            for family in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():  # type: ignore[misc]
                if family.name not in summed:
                    summed[family.name] = family  # of the parent: it started first
                elif family.name in _SUMMED or family.type == "counter":
                    mine, more = summed[family.name].samples[0], family.samples[0]
                    summed[family.name].samples[0] = mine._replace(value=mine.value + more.value)
        cpu = summed.get("process_cpu_seconds")
        if cpu is not None:
            sample = cpu.samples[0]
            cpu.samples[0] = sample._replace(value=sample.value + self._ended_cpu_seconds())
        return summed.values()
