"""The report of a conversion: the tensors compared, the result, and the reason for a refusal."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from modelport import __version__
from modelport.exporters.keras_conversion.output_comparison import (
    BOUND,
    EXPECTED,
    OutputRow,
    ProbeRow,
)
from modelport.exporters.keras_conversion.weight_comparison import TensorRow
from modelport.exporters.runtime.temporary_folder import temporary_folder

FORMAT = "modelport-conversion/1"
SUFFIX = ".report.json"


@dataclass(frozen=True, slots=True)
class End:
    """One of the two files, and its number of tensors."""

    file: str
    framework: str
    sha256: str


@dataclass(slots=True)
class ConversionReport:
    """The result of a conversion; ``reason`` is empty if both files hold the same model."""

    model: str
    model_kwargs: Mapping[str, Any]
    source: End
    target: End
    samples: int
    seed: int
    tensors: Sequence[TensorRow] = ()
    outputs: Sequence[OutputRow] = ()
    probes: Sequence[ProbeRow] = ()
    reason: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def first_divergence(self) -> str | None:
        """The first layer whose activations diverge."""
        return next((probe.layer for probe in self.probes if probe.diverges), None)


def path_of(target: Path) -> Path:
    """The path of the report of ``target``, which may itself have been refused."""
    return target.with_name(target.name + SUFFIX)


def write(report: ConversionReport, path: Path) -> None:
    """Write the report; an older one is replaced."""
    content = {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "passed": not report.reason,
        "reason": report.reason or None,
        "warnings": report.warnings,
        "model": {"name": report.model, "model_kwargs": dict(report.model_kwargs)},
        "source": asdict(report.source),
        "target": asdict(report.target),
        "tensors": [_tensor(row) for row in report.tensors],
        "outputs": {
            "samples": report.samples,
            "seed": report.seed,
            "bound": BOUND,
            "expected": EXPECTED,
            "errors": [asdict(row) for row in report.outputs],
        },
        "activations": {
            "first_divergence": report.first_divergence,
            "relative_errors": {row.layer: row.relative_error for row in report.probes},
        },
        "versions": {
            "modelport": __version__,
            **{name: importlib.metadata.version(name) for name in ("torch", "tensorflow", "keras")},
        },
    }
    text = json.dumps(_finite(content), indent=2, allow_nan=False) + "\n"
    with temporary_folder(path.parent) as folder:
        written = folder / path.name
        written.write_text(text)
        os.replace(written, path)


def _tensor(row: TensorRow) -> dict[str, Any]:
    return {
        "layer": row.layer,
        "tensor": row.tensor,
        "shape": {"source": row.source_shape, "target": row.target_shape},
        "norm": dict(zip(("source", "target"), row.norms, strict=True)),
        "max_abs_error": row.max_abs_error,
        "verdict": row.verdict or "same",
    }


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
