"""The export pipeline: load, convert, prove, certify, sign, publish.

``modelport export`` is a thin command over ``export``; programs call it with an ``ExportRequest``.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelport.exporters import artifact_conversion
from modelport.exporters.export_request import ExportRequest
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import ALL, Format, check_route, find_format
from modelport.exporters.loaded_model import Source
from modelport.exporters.optimization.options import OptimizationOptions
from modelport.exporters.proof import certificate, evaluation, ranges
from modelport.exporters.proof.parity_report import ParityReport
from modelport.exporters.proof.proof import Checks, Progress, Proof
from modelport.exporters.publishing import contract, publish, served_once
from modelport.exporters.requests import sample_requests, triton_warmup
from modelport.exporters.requests.random_inputs import counts_positions, sampler, unpadded_sampler
from modelport.exporters.runtime import resource_usage
from modelport.exporters.runtime.file_errors import writing_to
from modelport.exporters.runtime.garbage import collected_without_libraries
from modelport.exporters.sources import image_metadata, reader_selection
from modelport.gateway.errors import AlreadyExists, Unsupported, UsageError
from modelport.gateway.repository import config, signed_config, signing, signing_keys
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.manifest import files_of
from modelport.gateway.repository.storage.location import Location

DTYPES = ("fp32", "fp16", "bf16")
QUANTIZATIONS = ("int8", "int8-weight-only", "int4")
LABELS_FILE = "labels.txt"
#: Formats that the gateway serves with ``--allow-native-code`` or a signature alone.
NATIVE = ("aoti",)


@dataclass(frozen=True, slots=True)
class ExportResult:
    """One exported artifact. ``version`` is None if ``output`` was given; ``notices`` say what of
    the checkpoint it lacks."""

    name: str
    format: str
    precision: str
    version: int | None
    path: Path | Location
    size_bytes: int
    proof: Proof
    seconds: float
    notices: tuple[str, ...] = ()


@dataclass(slots=True)
class _Artifact:
    """An artifact in the making: its name, and the folder it is written to."""

    row: Format
    target: ExportTarget
    config: ModelConfig
    folder: Path | Location
    filename: str
    staged: Path = Path()
    proof: Proof | None = None
    seconds: float = 0.0


def export(
    request: ExportRequest, progress: Progress = lambda stage, done, total: None
) -> list[ExportResult]:
    """Export, prove and publish; nothing is published unless every format is proven.

    Raises:
        UsageError, AlreadyExists: the request is wrong or does not fit the checkpoint.
        ParityError: an artifact does not compute what the checkpoint computes.
        Unsupported: there is no way to this format, datatype or opset.
        IntegrityError: the checkpoint is damaged or wants to run code.
    """
    rows = _rows(request)
    key = None if request.sign_key is None else signing_keys.load_private_key(request.sign_key)
    progress("loading", 0, 0)
    resource_usage.forget_peak()
    source = reader_selection.load(request.source)
    loading = resource_usage.peak_memory_bytes()
    source = image_metadata.describe(source, request.image, request.labels)
    target = request.optimization.applied(request.target, source)
    target = replace(target, adopted=request.artifact is not None)
    for row in rows:
        check_route(source, row, target)
    request = replace(request, target=target)
    checks = request.checks
    if request.data is not None:
        checks = replace(checks, data=evaluation.read(request.data, source))
    artifacts = [_artifact(request, source, row, len(rows) > 1) for row in rows]
    if len({artifact.config.name for artifact in artifacts}) < len(artifacts):
        raise UsageError(
            f"--name-template '{request.destination.name_template}' gives two formats the same "
            "name; put {format} into it"
        )
    with collected_without_libraries(), ExitStack() as stack:
        for artifact in artifacts:
            _declare(artifact.config, ranges.of(_with_published_ranges(request, source, artifact)))
            with _writing_to(artifact.folder):
                if request.destination.output is None:  # fail before the work rather than after it
                    _check_free(request, source, artifact)
                    publish.check_writable(artifact.folder, artifact.config.name)
                artifact.staged = stack.enter_context(
                    publish.staging(artifact.folder, artifact.config.name)
                )
        for artifact in artifacts:
            resource_usage.forget_peak()
            published = _with_published_ranges(request, source, artifact)
            _make(request, published, checks, artifact, progress, loading)
            if key is not None:
                signing.sign(artifact.staged, key)
        progress("publishing", 0, 0)
        return [_deliver(request, source, artifact) for artifact in artifacts]


def _check_free(request: ExportRequest, source: Source, artifact: _Artifact) -> None:
    """Raise unless the version may be published; the message lists the differences."""
    name = artifact.config.name
    try:
        publish.free_version(artifact.folder, artifact.config, request.destination.version)
    except AlreadyExists as error:
        assert request.destination.version is not None
        there = publish.certificate_of(artifact.folder, name, request.destination.version)
        here = certificate.provenance(name, request.source, source, artifact.row, artifact.target)
        parts = {part: there[part] for part in here if part in there}
        if not parts:
            raise
        parts["artifact"] = {key: parts["artifact"].get(key) for key in here["artifact"]}
        found = contract.differences(parts, here)
        raise AlreadyExists(
            f"{error}; "
            + (
                f"they differ: {found}"
                if found
                else "it has the same checkpoint, options and versions"
            )
        ) from error


def _rows(request: ExportRequest) -> list[Format]:
    """The requested formats without duplicates, checked before anything is loaded."""
    target = request.target
    for flag, value, known in (
        ("--dtype", target.dtype, DTYPES),
        ("--quantize", target.quantize, QUANTIZATIONS),
    ):
        if value is not None and value not in known:
            raise Unsupported(f"{flag} '{value}' is not supported; use {' or '.join(known)}")
    if target.quantize and target.dtype != "fp32":
        raise UsageError("--quantize and --dtype are mutually exclusive; choose one")
    if request.destination.name is not None:
        contract.check_name(request.destination.name)
    names = [n for name in request.formats for n in (ALL if name == "all" else (name,))]
    rows = [find_format(name) for name in dict.fromkeys(names)]
    if target.opset is not None and all(row.name != "onnx" for row in rows):
        raise UsageError(f"--opset is for ONNX only; --format {' '.join(request.formats)} has none")
    if request.artifact is not None and request.optimization != OptimizationOptions():
        raise UsageError("a file is certified as it is; omit --optimize, --calibrate, --block-size")
    request.optimization.check(rows, target.quantize)
    return rows


def _artifact(request: ExportRequest, source: Source, row: Format, several: bool) -> _Artifact:
    name = request.destination.model_name(source.spec.name, row, request.target, several)
    wanted = config.build(name, row.platform, source.signature)
    for key, value in source.spec.parameters.items():
        wanted.parameters[key].string_value = value
    lengths = {x.name for x in source.signature.inputs if counts_positions(x)}
    for mask in source.spec.masks:
        if mask.outputs or mask.input not in lengths:
            wanted.parameters[f"mask.{mask.input}"].string_value = mask.padding
    if source.labels and source.spec.decision:
        chosen = (o for o in wanted.output if o.name == source.spec.decision.output)
        for output in chosen:
            output.label_filename = LABELS_FILE
    folder, filename = request.destination.file_of(row, several)
    opset = row.routes[source.framework].opset_for(request.target)
    return _Artifact(row, replace(request.target, opset=opset), wanted, folder, filename)


def _with_published_ranges(request: ExportRequest, source: Source, artifact: _Artifact) -> Source:
    """``source`` with the ranges of a model's earlier version, where they are within those found:
    versions keep one contract."""
    if not source.found_ranges or request.destination.output is not None:
        return source
    there = publish.signature_of(artifact.folder, artifact.config.name)
    found = ranges.of(source)
    kept: dict[str, tuple[int, int]] = {}
    for spec in () if there is None else there.inputs:
        low, high = found.get(spec.name, (1, 0))
        least, most = spec.minimum, spec.maximum
        if isinstance(least, int) and isinstance(most, int) and low <= least <= most <= high:
            kept[spec.name] = (least, most)
    return replace(source, signature=ranges.applied(source.signature, kept))


def _declare(wanted: ModelConfig, found: Mapping[str, tuple[int, int]]) -> None:
    """Declare the range of each input that was found, unless it has every value."""
    datatypes = {spec.name: spec.datatype for spec in config.signature(wanted).inputs}
    for name, (low, high) in found.items():
        if ranges.is_whole(datatypes[name], low, high):
            wanted.parameters.pop(f"range.{name}", None)
        else:
            wanted.parameters[f"range.{name}"].string_value = f"{low}..{high}"


def _make(
    request: ExportRequest,
    source: Source,
    checks: Checks,
    artifact: _Artifact,
    progress: Progress,
    loading: int,
) -> None:
    """Write the artifact, prove it, and write its certificate beside it.

    Args:
        loading: the memory that loading the model took.
    """
    started = time.perf_counter()
    row, target, path = artifact.row, artifact.target, artifact.staged / artifact.filename

    def told(stage: str, done: int, total: int) -> None:
        progress(f"{row.name}: {stage}", done, total)

    with _writing_to(artifact.folder):
        artifact.proof = artifact_conversion.make(
            source, row, target, path, checks, told, request.artifact
        )
        proven = artifact.proof.report.ranges
        _declare(artifact.config, proven)
        source = replace(source, signature=ranges.applied(source.signature, proven))
        requests = triton_warmup.requests(source.signature, sampler(source.spec), checks.seed)
        if row.name == "savedmodel":
            from modelport.exporters.publishing import tensorflow_serving_warmup

            tensorflow_serving_warmup.write(path, artifact.config.name, requests)
        if request.destination.output is None:
            for name, data in source.companions.items():
                (artifact.staged / name).write_bytes(data)
        told("recording the checkpoint's outputs", 0, 0)
        samples = _record(request, source, artifact.staged, artifact.proof.report)
        artifact.proof.usage.peak_memory_bytes = max(loading, resource_usage.peak_memory_bytes())
        content = certificate.certify(
            model=artifact.config.name,
            request=request.source,
            source=source,
            row=row,
            target=target,
            proof=artifact.proof,
            artifact=artifact.staged,
            samples=samples,
            configuration=signed_config.document(artifact.config),
        )
        text = json.dumps(content, indent=2) + "\n"
        (artifact.staged / certificate.FILENAME).write_text(text)
        if request.destination.output is None:
            _write_labels(source, artifact.staged.parent)
            told("loading it into the gateway", 0, 0)
            native = request.sign_key is not None or row.name in NATIVE
            served_once.check(
                artifact.staged, artifact.config, source, artifact.proof.report, native
            )
            triton_warmup.add(artifact.config, artifact.staged.parent, requests)
    gc.collect()
    artifact.seconds = time.perf_counter() - started


def _record(
    request: ExportRequest, source: Source, version: Path, report: ParityReport
) -> dict[str, Any] | None:
    """Record the checkpoint's answers, which a release gate compares a version with; None if no
    version is published."""
    if request.destination.output is not None:
        return None
    allowed = sample_requests.tolerance(
        report.atol,
        report.rtol,
        report.bounds is not None or bool(report.conditioning),
        report.max_abs_error,
    )
    return sample_requests.record_version(
        version,
        source.signature,
        unpadded_sampler(source.spec),
        source.reference,
        allowed,
        count=report.samples,
        seed=report.seed,
    )


def _write_labels(source: Source, model: Path) -> None:
    """Write the names of the classes beside a new model's ``config.pbtxt``."""
    if source.labels:
        text = "\n".join(source.labels) + "\n"
        # JSON's escapes can make half of a character, which no file holds
        (model / LABELS_FILE).write_bytes(text.encode(errors="replace"))


def _deliver(request: ExportRequest, source: Source, artifact: _Artifact) -> ExportResult:
    others = {sample_requests.FILENAME, *source.companions}
    names = [name for name in files_of(artifact.staged) if name not in others]
    size = sum((artifact.staged / name).stat().st_size for name in names)
    with _writing_to(artifact.folder):
        if request.destination.output is None:
            done = publish.publish(
                artifact.staged, artifact.folder, artifact.config, request.destination.version
            )
            version, path = done.version, done.path
        else:
            assert isinstance(artifact.folder, Path)
            publish.deliver(artifact.staged, artifact.folder)
            version, path = None, artifact.folder / artifact.filename
    assert artifact.proof is not None
    return ExportResult(
        name=artifact.config.name,
        format=artifact.row.name,
        precision=artifact.target.precision,
        version=version,
        path=path,
        size_bytes=size,
        proof=artifact.proof,
        seconds=artifact.seconds,
        notices=source.notices,
    )


def _writing_to(folder: Path | Location) -> AbstractContextManager[None]:
    return writing_to(folder, "choose another --repository or --output")
