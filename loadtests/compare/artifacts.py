"""Artifacts to compare: exported if missing, described by their certificates."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelport.gateway.errors import UsageError
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.version_proof import VersionProof, proof_in
from modelport.loadtests.compare.plan import Variant
from modelport.loadtests.compare.result import Absent
from modelport.loadtests.serving.gateway import newest_version
from modelport.loadtests.system.modelport_command import (
    INTEGRITY,
    INTERRUPTED,
    USAGE,
    Failed,
    modelport,
)

#: A new version of one of these libraries requires new artifacts.
LIBRARIES = (
    "modelport",
    "torch",
    "onnx",
    "onnxruntime",
    "tensorflow",
    "keras",
    "ai-edge-litert",
    "openvino",
)


@dataclass(frozen=True)
class Certified:
    """The compared values of a version's ``certificate.json``."""

    size_bytes: int
    max_abs_error: float
    mean_abs_error: float
    atol: float
    rtol: float
    #: Share of decisions that agree: on held-out rows if there are any, otherwise on random inputs.
    agreement: float | None
    decisions: int | None
    metric_name: str | None
    metric: float | None
    checkpoint: str
    checkpoint_sha256: str
    proof: VersionProof = field(default_factory=VersionProof)
    #: Values were held to their decisions, and not to the tolerance.
    bounded: bool = False
    #: Speed over the unoptimised file, and the rows of the requests it was measured with.
    speedup: float | None = None
    speedup_rows: int | None = None


@dataclass(frozen=True)
class ComparedArtifact:
    """A published version: the model's folder, the version's number, and its certificate."""

    variant: Variant
    folder: Path
    version: str
    certificate: Certified


@dataclass(frozen=True)
class ComparedCheckpoint:
    """The inputs of ``modelport export``.

    Attributes:
        data: held-out rows for proving int8 by the metric; None: none.
        more: further flags of ``modelport export``.
    """

    path: Path
    model: str | None
    data: Path | None
    more: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        return (str(self.path), *(("--model", self.model) if self.model else ()), *self.more)


def key_of(checkpoint: ComparedCheckpoint) -> str:
    """The key of cached artifacts: digests of the contents, the flags and the exporting
    libraries."""
    digest = hashlib.sha256(" ".join((checkpoint.model or "", *checkpoint.more)).encode())
    for path in filter(None, (checkpoint.path, checkpoint.data)):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                digest.update(bytes.fromhex(sha256_of(file)))
    for library in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{library} {importlib.metadata.version(library)}".encode())
    return digest.hexdigest()[:16]


def sha256_of(path: Path) -> str:
    with untrusted_files.open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def export(
    checkpoint: ComparedCheckpoint,
    variants: Sequence[Variant],
    repository: Path,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[dict[Variant, ComparedArtifact], list[Absent]]:
    """Publish every variant in ``repository``; return them, and the failures.

    Each precision and optimisation is exported by one command, one command after another, as
    runtimes with spinning threads would take the cores from each other. A command proves all its
    artifacts before it publishes any, so if one is refused, the others are exported again,
    separately.

    Raises:
        UsageError: the checkpoint itself is invalid.
        Failed: the checkpoint is damaged, or wants to run code.
    """
    missing = [v for v in variants if not (repository / _name(v)).is_dir()]
    groups = [[v for v in missing if v.flags == flags] for flags in {v.flags for v in missing}]
    failed: dict[Variant, Failed] = {}
    if groups:
        progress(f"exporting {', '.join(map(str, missing))}")
        for group, error in _exports(checkpoint, groups, repository):
            if len(group) > 1 and error.status not in (USAGE, INTEGRITY, INTERRUPTED):
                alone = [[variant] for variant in group]
                failed |= {one[0]: e for one, e in _exports(checkpoint, alone, repository)}
            else:
                failed |= dict.fromkeys(group, error)
    _raise_if_not_the_formats_fault(failed, variants)
    artifacts = {
        v: published(repository / _name(v), variant=v) for v in variants if v not in failed
    }
    return artifacts, [Absent(str(v), str(failed[v])) for v in variants if v in failed]


def _raise_if_not_the_formats_fault(
    failed: Mapping[Variant, Failed], variants: Sequence[Variant]
) -> None:
    for error in failed.values():
        if error.status in (-2, INTERRUPTED):
            raise KeyboardInterrupt
        if error.status == INTEGRITY:
            raise error
        if error.status == USAGE and len(failed) == len(variants):
            raise UsageError(str(error))


def _name(variant: Variant) -> str:
    return f"model-{variant.slug}"


def _exports(
    checkpoint: ComparedCheckpoint, groups: Sequence[Sequence[Variant]], repository: Path
) -> list[tuple[Sequence[Variant], Failed]]:
    """Export each group, of one precision and optimisation, with one command; return the
    failures."""
    data = ("--data", str(checkpoint.data)) if checkpoint.data else ()
    failed = []
    for group in groups:
        template = f"model-{{format}}-{group[0].suffix}"
        names = ("--name-template", template, "--repository", str(repository))
        formats = [part for variant in group for part in ("--format", variant.format)]
        try:
            modelport(["export", *checkpoint.flags, *formats, *group[0].flags, *data, *names])
        except Failed as error:
            failed.append((group, error))
    return failed


def published(folder: Path, version: str = "", variant: Variant | None = None) -> ComparedArtifact:
    """Read a version of the model at ``folder``, by default the newest.

    Raises:
        UsageError: the version is missing, or has no valid certificate.
    """
    number = version or newest_version(folder)
    file = folder / number / "certificate.json"
    try:
        document = json.loads(
            untrusted_files.read_text(file, untrusted_files.MAX_CERTIFICATE_BYTES)
        )
        artifact = document["artifact"]
        found = Variant(
            artifact["format"],
            artifact["quantize"] or artifact["dtype"],
            artifact.get("optimize") or "",
        )
        return ComparedArtifact(variant or found, folder, number, _certified(document))
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read ({error.strerror}); compare versions that 'modelport export' "
            "published"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{file} is not a certificate of modelport ({error!r}); export the model again"
        ) from error


def _certified(document: Mapping[str, Any]) -> Certified:
    parity, found = document["parity"], document["evaluation"] or {}
    decision, outputs = parity["decision"] or {}, parity["outputs"].values()
    agreement, decisions = found.get("agreement"), found.get("rows")
    measured = (document.get("optimization") or {}).get("speedup", ())
    largest = measured[-1] if measured else None
    if agreement is None:
        agreement, decisions = decision.get("agreement"), decision.get("decisions")
    return Certified(
        size_bytes=int(document["artifact"]["size_bytes"]),
        max_abs_error=max(float(output["max_abs_error"]) for output in outputs),
        mean_abs_error=max(float(output["mean_abs_error"]) for output in outputs),
        atol=float(parity["tolerance"]["atol"]),
        rtol=float(parity["tolerance"]["rtol"]),
        agreement=agreement,
        decisions=None if decisions is None else int(decisions),
        metric_name=found.get("metric"),
        metric=found.get("artifact"),
        checkpoint=str(document["checkpoint"]["file"]),
        checkpoint_sha256=str(document["checkpoint"]["sha256"]),
        proof=proof_in(document),
        bounded=parity["bounds"] is not None,
        speedup=None if largest is None else float(largest["ratio"]),
        speedup_rows=None if largest is None else int(largest["batch"]),
    )
