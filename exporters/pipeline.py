"""One export from beginning to end: read, build, load, convert, prove, certify, publish.

``modelport export`` is a thin shell around ``export``; programs call it with an ``ExportRequest``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from exporters import certificate, checkpoint, parity, publish, spec
from exporters.errors import UsageError
from exporters.formats import Format, find_format
from gateway.errors import Unsupported
from gateway.repository import config
from gateway.repository.manifest import files_of
from gateway.types import ModelSignature

#: Told the stage's name, and how much of it is done of how much (0 of 0: unknown).
Progress = Callable[[str, int, int], None]

DTYPES = ("fp32",)
DEFAULT_REPOSITORY = Path("model_repository")
DEFAULT_MAX_BATCH_SIZE = 8


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What to export and how; None takes the default that the spec or the format declares.

    ``version`` None is the next free one. ``output`` is a file or folder to write to instead of
    publishing into ``repository``.
    """

    checkpoint: Path
    model: str
    format: str = "onnx"
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    repository: Path = DEFAULT_REPOSITORY
    version: int | None = None
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    opset: int | None = None
    atol: float | None = None
    rtol: float | None = None
    samples: int | None = None
    seed: int = 0
    dtype: str = "fp32"
    output: Path | None = None


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What was exported. ``version`` is None where ``output`` was asked for."""

    name: str
    version: int | None
    path: Path
    size_bytes: int
    report: parity.ParityReport
    seconds: float


@dataclass(frozen=True, slots=True)
class _Subject:
    """The loaded model and everything that follows from it."""

    name: str
    module: nn.Module
    spec: spec.ModelSpec
    signature: ModelSignature
    source: checkpoint.Checkpoint
    model_kwargs: Mapping[str, Any]


def export(
    request: ExportRequest, progress: Progress = lambda stage, done, total: None
) -> ExportResult:
    """Export, prove and publish; nothing is visible unless everything succeeded.

    Raises:
        UsageError, AlreadyExists: the request is wrong or does not fit the checkpoint.
        ParityError: the artifact does not compute what the checkpoint computes.
        Unsupported: there is no way to this format, datatype or opset.
        IntegrityError: the checkpoint is damaged or wants to run code.
    """
    started = time.perf_counter()
    if request.dtype not in DTYPES:
        raise Unsupported(f"--dtype '{request.dtype}' is not supported; use {' or '.join(DTYPES)}")
    if request.name is not None:
        publish.check_name(request.name)
    target = find_format(request.format)
    progress("loading", 0, 0)
    subject = _load(request)
    wanted = config.build(subject.name, target.platform, subject.signature)
    for key, value in subject.spec.parameters.items():
        wanted.parameters[key].string_value = value
    folder, filename = _destination(request, target)
    try:
        if request.output is None:  # a conflict is better known before the work than after it
            publish.free_version(folder, wanted, request.version)
        with publish.staging(folder) as staged:
            report = _convert(request, target, subject, staged / filename, progress)
            size = sum((staged / name).stat().st_size for name in files_of(staged))
            progress("publishing", 0, 0)
            if request.output is None:
                published = publish.publish(staged, folder, wanted, request.version)
                version, path = published.version, published.path
            else:
                publish.deliver(staged, folder)
                version, path = None, folder / filename
    except OSError as error:
        raise UsageError(
            f"cannot write to '{folder}': {error.strerror or error}; free space there, or choose "
            "another --repository or --output"
        ) from error
    elapsed = time.perf_counter() - started
    return ExportResult(subject.name, version, path, size, report, elapsed)


def _load(request: ExportRequest) -> _Subject:
    source = checkpoint.read(request.checkpoint)
    known = {**source.model_kwargs, **request.model_kwargs}
    module, declared, kwargs = spec.build(request.model, source.shapes, known)
    checkpoint.load_into(module, source)
    name = request.name or declared.name
    publish.check_name(name)
    signature = declared.signature(module, request.max_batch_size)
    return _Subject(name, module, declared, signature, source, kwargs)


def _destination(request: ExportRequest, target: Format) -> tuple[Path, str]:
    """The folder to write into and the artifact's file name in it."""
    default = target.platform.default_filename
    if request.output is None:
        return request.repository, default
    if request.output.suffix == Path(default).suffix and not request.output.is_dir():
        return request.output.parent, request.output.name
    return request.output, default


def _convert(
    request: ExportRequest, target: Format, subject: _Subject, path: Path, progress: Progress
) -> parity.ParityReport:
    """Write the artifact to ``path``, prove it, and write its certificate beside it."""
    module, declared, signature = subject.module, subject.spec, subject.signature
    opset = target.default_opset if request.opset is None else request.opset
    with parity.inference_mode(module):
        progress("converting", 0, 0)
        try:
            target.export(module, signature, path, opset)
        except Unsupported:
            # An exporter blames its operators even where it is the model that cannot run.
            parity.rehearse(module, signature, declared, request.seed)
            raise
        report = parity.check(
            module,
            target.open_session(path),
            signature,
            declared,
            samples=request.samples or parity.default_samples(module),
            seed=request.seed,
            atol=declared.atol if request.atol is None else request.atol,
            rtol=declared.rtol if request.rtol is None else request.rtol,
            progress=lambda done, total: progress("proving", done, total),
        )
    content = certificate.certify(
        model=subject.name,
        format_name=target.name,
        opset=opset,
        dtype=request.dtype,
        libraries=target.libraries,
        checkpoint=subject.source,
        model_kwargs=subject.model_kwargs,
        report=report,
        artifact=path.parent,
    )
    (path.parent / certificate.FILENAME).write_text(json.dumps(content, indent=2) + "\n")
    return report
