"""What there is to serve: exported where it is missing, read from certificates where it is not."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelport.gateway.cli.errors import UsageError
from modelport.loadtests.command import INTEGRITY, INTERRUPTED, USAGE, Failed, modelport
from modelport.loadtests.compare.comparison import Absent
from modelport.loadtests.compare.plan import Variant
from modelport.loadtests.serving.gateway import newest_version

#: Whoever updates one of these gets new artifacts.
LIBRARIES = ("modelport", "torch", "onnx", "onnxruntime", "tensorflow", "keras", "ai-edge-litert")


@dataclass(frozen=True)
class Certified:
    """What a version's ``certificate.json`` says, as far as it is compared."""

    size_bytes: int
    max_abs_error: float
    mean_abs_error: float
    atol: float
    rtol: float
    #: Share of decisions kept: on held-out rows where there were any, else on drawn inputs.
    agreement: float | None
    decisions: int | None
    metric_name: str | None
    metric: float | None
    checkpoint: str
    checkpoint_sha256: str
    #: ``parity.decision``.
    decision: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Artifact:
    """A published version: the model's folder, the version's number, and what was proven."""

    variant: Variant
    folder: Path
    version: str
    certificate: Certified


@dataclass(frozen=True)
class Checkpoint:
    """What ``modelport export`` is given.

    Attributes:
        data: held-out rows, so that int8 is proven by the metric; None: none.
        more: further flags of ``modelport export``.
    """

    path: Path
    model: str | None
    data: Path | None
    more: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        return (str(self.path), *(("--model", self.model) if self.model else ()), *self.more)


def key_of(checkpoint: Checkpoint) -> str:
    """What names the cached artifacts: the contents, the flags, the libraries that export them."""
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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def export(
    checkpoint: Checkpoint,
    variants: Sequence[Variant],
    repository: Path,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[dict[Variant, Artifact], list[Absent]]:
    """Every variant as a published version in ``repository``, and what could not be had.

    Those of one precision are exported by one command, one command after another: runtimes whose
    threads wait by spinning would keep each other from the cores. All artifacts of a command are
    proven before any is published, so where one is refused the others are exported again, alone.

    Raises:
        UsageError: the checkpoint itself is wrong.
        Failed: it is damaged, or wants to run code.
    """
    missing = [v for v in variants if not (repository / _name(v)).is_dir()]
    groups = [[v for v in missing if v.precision == p] for p in {v.precision for v in missing}]
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
    checkpoint: Checkpoint, groups: Sequence[Sequence[Variant]], repository: Path
) -> list[tuple[Sequence[Variant], Failed]]:
    """Export each group, all of one precision, by a command; those that failed, with why."""
    data = ("--data", str(checkpoint.data)) if checkpoint.data else ()
    names = ("--name-template", "model-{format}-{precision}", "--repository", str(repository))
    failed = []
    for group in groups:
        formats = [part for variant in group for part in ("--format", variant.format)]
        try:
            modelport(["export", *checkpoint.flags, *formats, *group[0].flags, *data, *names])
        except Failed as error:
            failed.append((group, error))
    return failed


def published(folder: Path, version: str = "", variant: Variant | None = None) -> Artifact:
    """The version of the model at ``folder``, the newest unless one is named.

    Raises:
        UsageError: it is not there, or nothing vouches for it.
    """
    number = version or newest_version(folder)
    file = folder / number / "certificate.json"
    try:
        document = json.loads(file.read_text())
        artifact = document["artifact"]
        found = Variant(artifact["format"], artifact["quantize"] or artifact["dtype"])
        return Artifact(variant or found, folder, number, _certified(document))
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read ({error.strerror}); compare what 'modelport export' published"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} is no certificate of modelport: {error!r}") from error


def _certified(document: Mapping[str, Any]) -> Certified:
    parity, found = document["parity"], document["evaluation"] or {}
    decision, outputs = parity["decision"] or {}, parity["outputs"].values()
    agreement, decisions = found.get("agreement"), found.get("rows")
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
        decision=parity["decision"],
    )
