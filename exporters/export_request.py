"""The request of an export, and its parts from the arguments of ``api.export``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelport.exporters.arguments import check_bounds, check_plain, path_of, place_of
from modelport.exporters.artifact_destination import Destination
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.optimization.options import OptimizationOptions
from modelport.exporters.proof.proof import Checks
from modelport.exporters.publishing import contract
from modelport.exporters.sources import SourceRequest
from modelport.gateway.repository.storage.location import Location


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The options of one export.

    Attributes:
        formats: names of ``formats.registry.FORMATS``, or ``all``.
        optimization: how converted graphs are optimised and quantised.
        data: held-out inputs, see ``evaluation``.
        image, labels: see ``image_metadata.describe``.
        sign_key: a private key to sign the certificates with.
        artifact: an ONNX file to prove instead of converting the source.
    """

    source: SourceRequest
    formats: tuple[str, ...]
    target: ExportTarget
    checks: Checks
    destination: Destination
    optimization: OptimizationOptions
    data: Path | None = None
    image: Mapping[str, str] = field(default_factory=dict)
    labels: Path | None = None
    sign_key: Path | None = None
    artifact: Path | None = None


def source(
    checkpoint: Path | str,
    model: str | None,
    task: str | None,
    model_kwargs: Mapping[str, Any] | None,
    lora: Path | str | None,
    max_batch_size: int,
) -> SourceRequest:
    """The checkpoint, and the model to load it into."""
    check_bounds(max_batch_size=max_batch_size)
    check_plain(model_kwargs or {}, "--model-kwargs")
    return SourceRequest(
        checkpoint=Path(checkpoint),
        model=model,
        model_kwargs=dict(model_kwargs or {}),
        max_batch_size=max_batch_size,
        lora=path_of(lora),
        task=task,
    )


def checks(
    samples: int | None,
    seed: int,
    atol: float | None,
    rtol: float | None,
    max_drop: float,
    min_agreement: float | None,
    max_relative_error: float | None,
) -> Checks:
    """The limits that artifacts are held to."""
    check_bounds(samples=samples, seed=seed, atol=atol, rtol=rtol, max_drop=max_drop)
    check_bounds(min_agreement=min_agreement, max_relative_error=max_relative_error)
    return Checks(
        samples=samples,
        seed=seed,
        atol=atol,
        rtol=rtol,
        agreement=min_agreement,
        relative_error=max_relative_error,
        max_drop=max_drop,
    )


def optimization(
    level: str | None,
    calibrate: Sequence[Path | str],
    calibration_method: str | None,
    per_channel: bool | None,
    block_size: int | None,
) -> OptimizationOptions:
    """The changes to converted graphs."""
    files = tuple(map(Path, calibrate))
    return OptimizationOptions(level, files, calibration_method, per_channel, block_size)


def destination(
    repository: Path | Location | str,
    name: str | None,
    name_template: str | None,
    version: int | str,
    output: Path | str | None,
) -> Destination:
    """The place that artifacts are written to, and their names there."""
    return Destination(
        repository=place_of(repository),
        name=name,
        name_template=name_template,
        version=contract.parse_version(str(version)),
        output=path_of(output),
    )
