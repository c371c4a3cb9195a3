"""ONNX files that others exported: copied as they are, and proven like our own."""

from __future__ import annotations

import shutil
from pathlib import Path

from modelport.exporters import inspection
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.loaded_model import Source
from modelport.exporters.runtime.resource_usage import Usage, measured
from modelport.gateway.errors import Unsupported
from modelport.gateway.repository.artifact_checks import onnx_guard


def adopt(artifact: Path, path: Path) -> Usage:
    """Copy ``artifact``, and the weights beside it, to ``path``, and check the copy.

    Raises:
        IntegrityError: the file is damaged, or does more than compute.
    """
    with measured() as usage:
        onnx_guard.check(artifact)
        shutil.copyfile(artifact, path)
        for file in inspection.inspect(artifact).external_data:
            (path.parent / file.file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(artifact.parent / file.file, path.parent / file.file)
        onnx_guard.check(path)
    return usage


def export(source: Source, path: Path, target: ExportTarget) -> None:
    """Refuse, because recorded answers hold no model to convert."""
    raise Unsupported(
        f"'{source.spec.name}' holds recorded outputs and no model; prove an artifact against them "
        "with modelport certify MODEL.onnx --against FILE.npz"
    )
