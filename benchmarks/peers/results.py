"""Results of a comparison: samples by model, server and case, with their file format."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: The protocol of the loop without a server; its load is a batch size.
LOOP = "loop"
PROTOCOLS = {
    "json": "HTTP JSON",
    "binary": "HTTP binary",
    "grpc": "gRPC",
    "perf_analyzer": "gRPC by perf_analyzer",
    LOOP: "batch size",
}


@dataclass(frozen=True)
class PeerSample:
    """One run of one client against one server."""

    requests_per_second: float
    failed: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class PeerCase:
    """A cell of a server's row: a protocol, and the number of requests in flight."""

    protocol: str
    load: int

    @property
    def title(self) -> str:
        return f"{PROTOCOLS[self.protocol]}, {self.load}"

    @property
    def key(self) -> str:
        return f"{self.protocol}-{self.load}"

    @classmethod
    def of(cls, key: str) -> PeerCase:
        protocol, _, load = key.rpartition("-")
        return cls(protocol, int(load))


@dataclass
class PeerRow:
    """A server's samples, one per round; ``missing`` is the reason if there are no more."""

    about: str
    missing: str | None = None
    cases: dict[PeerCase, list[PeerSample]] = field(default_factory=dict)

    def rates(self, case: PeerCase) -> list[float]:
        return [sample.requests_per_second for sample in self.cases.get(case, [])]


@dataclass
class Results:
    """Model → server → row, with the machine and the options of the run."""

    hardware: dict[str, Any]
    options: dict[str, Any]
    models: dict[str, dict[str, PeerRow]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        document = {
            "hardware": self.hardware,
            "options": self.options,
            "models": {
                model: {name: _plain(row) for name, row in rows.items()}
                for model, rows in self.models.items()
            },
        }
        path.write_text(json.dumps(document, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        document = json.loads(path.read_text())
        models = {
            model: {name: _row(plain) for name, plain in rows.items()}
            for model, rows in document["models"].items()
        }
        return cls(document["hardware"], document["options"], models)

    @property
    def failed(self) -> int:
        """The number of requests without a correct answer."""
        rows = (row for model in self.models.values() for row in model.values())
        return sum(s.failed for row in rows for samples in row.cases.values() for s in samples)


def _plain(row: PeerRow) -> dict[str, Any]:
    cases = {case.key: [asdict(s) for s in samples] for case, samples in row.cases.items()}
    return {"about": row.about, "missing": row.missing, "cases": cases}


def _row(plain: Mapping[str, Any]) -> PeerRow:
    cases = {
        PeerCase.of(key): [PeerSample(**s) for s in many] for key, many in plain["cases"].items()
    }
    return PeerRow(plain["about"], plain["missing"], cases)


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The median of the per-round ratios, as a slow round slows both."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if b > 0]
    return median(a / b for a, b in pairs) if pairs else None


def by_hand(rows: Mapping[str, PeerRow], raw: str) -> dict[int, list[float]]:
    """Batch size → rows per second of each round, in the loop without a server."""
    loops = rows.get(raw, PeerRow("")).cases
    return {
        case.load: [sample.requests_per_second for sample in samples]
        for case, samples in sorted(loops.items(), key=lambda pair: pair[0].load)
        if samples
    }


def best_batch(loops: Mapping[int, Sequence[float]]) -> int | None:
    """The batch size with the highest median."""
    return max(loops, key=lambda batch: median(loops[batch]), default=None)
