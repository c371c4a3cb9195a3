"""``certificate.json``: the record of an artifact's proof and of the inputs it was proven on.

It names no path, host or user, so that it can be shipped with the model.
``gateway.repository.signing`` signs it and checks the signature.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelport import __version__
from modelport.exporters.model_spec import AttentionMask
from modelport.gateway.repository import signed_config, signing
from modelport.gateway.repository.manifest import files_of, sha256_of

if TYPE_CHECKING:
    from modelport.exporters.formats.base import ExportTarget
    from modelport.exporters.formats.registry import Format
    from modelport.exporters.loaded_model import Origin, Source
    from modelport.exporters.proof.parity_report import ParityReport
    from modelport.exporters.proof.proof import Proof
    from modelport.exporters.sources import SourceRequest

FILENAME = signing.CERTIFICATE
FORMAT = "modelport-certificate/1"


def certify(
    *,
    model: str,
    request: SourceRequest,
    source: Source,
    row: Format,
    target: ExportTarget,
    proof: Proof,
    artifact: Path,
    configuration: dict[str, Any],
    samples: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the certificate's content.

    Args:
        artifact: the folder whose files the certificate lists.
        configuration: the model's configuration, from ``signed_config.document``.
        samples: the recorded answers of the checkpoint, from ``sample_requests.record_version``.
    """
    known = provenance(model, request, source, row, target)
    files = [name for name in files_of(artifact) if name not in signing.UNLISTED]
    return {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": known["model"],
        signed_config.KEY: configuration,
        "checkpoint": known["checkpoint"],
        "adapters": known["adapters"],
        "artifact": {
            **known["artifact"],
            "size_bytes": sum(
                (artifact / name).stat().st_size for name in files if name not in source.companions
            ),
            "files": {name: {"sha256": sha256_of(artifact / name)} for name in files},
        },
        "parity": _parity(proof.report),
        "evaluation": None if proof.evaluation is None else asdict(proof.evaluation),
        "optimization": None if proof.optimization is None else asdict(proof.optimization),
        "samples": samples,
        "resources": {
            "export_seconds": round(proof.usage.seconds, 3),
            "peak_memory_bytes": proof.usage.peak_memory_bytes,
        },
        "versions": known["versions"],
        "hardware": {
            "cpu": _cpu_model(),
            "machine": platform.machine(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        },
    }


def provenance(
    model: str, request: SourceRequest, source: Source, row: Format, target: ExportTarget
) -> dict[str, Any]:
    """The part of a certificate that is known before the export: sources and library versions."""
    checkpoint, *adapters = source.origins
    libraries = row.routes[source.framework].libraries
    return {
        "model": {
            "name": model,
            "factory": request.model,
            "task": request.task,
            "model_kwargs": dict(source.model_kwargs),
            "max_batch_size": request.max_batch_size,
            "inputs": list(request.inputs),
            "output_names": list(request.output_names),
            "masks": list(request.masks),
            "parameters": source.parameter_count,
            "weights": asdict(source.weights),
        },
        "checkpoint": _origin(checkpoint),
        "adapters": [_origin(adapter) for adapter in adapters],
        "artifact": {
            "format": row.name,
            "opset": target.opset,
            "dtype": target.dtype,
            "quantize": target.quantize,
            "optimize": target.optimize,
            "quantization": _quantization(target),
        },
        "versions": {
            "modelport": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in ("numpy", *libraries)},
        },
    }


def _quantization(target: ExportTarget) -> dict[str, Any] | None:
    """The scheme of quantisation in ONNX; other formats have only one."""
    if target.quantize is None or target.opset is None or target.adopted:
        return None
    if target.quantize != "int8":
        return {"scheme": "weight-only", "block_size": target.block_size}
    data = target.calibration
    if data is None:
        return {"scheme": "dynamic", "per_channel": target.per_channel}
    return {
        "scheme": "static",
        "per_channel": target.per_channel,
        "calibration_method": target.calibration_method,
        "calibration": [_origin(origin) for origin in data.origins],
        "calibration_rows": data.rows,
    }


def _version(library: str) -> str:
    """The version of a distribution, or of its variant without GPUs, such as ``xgboost-cpu``."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version(f"{library}-cpu")


def _origin(origin: Origin) -> dict[str, str]:
    return {"file": origin.name, "sha256": origin.sha256}


def _parity(report: ParityReport) -> dict[str, Any]:
    decision = report.decision
    return {
        "passed": True,
        "seed": report.seed,
        "samples": report.samples,
        "edge_samples": report.edge_samples,
        "edge_cases": dict(report.edges),
        "ranges": {name: list(found) for name, found in report.ranges.items()},
        "limits": [asdict(limit) for limit in report.limits],
        "rows_beside_others": report.neighbours,
        "batch_sizes": sorted(report.batch_sizes),
        "axis_sizes": {name: sorted(sizes) for name, sizes in report.axis_sizes.items()},
        "tolerance": {"atol": report.atol, "rtol": report.rtol},
        "bounds": None if report.bounds is None else asdict(report.bounds),
        "conditioning": {name: asdict(one) for name, one in report.conditioning.items()},
        "branched_samples": report.branched_samples,
        "masks": [asdict(mask) for mask in report.masks],
        "outputs": {
            name: {
                "max_abs_error": output.max_abs_error,
                "mean_abs_error": output.mean_abs_error,
                "relative_error": output.relative_error,
                "values": output.values,
            }
            for name, output in report.outputs.items()
        },
        "decision": decision
        and {
            "output": decision.output,
            "kind": "argmax" if decision.threshold is None else f">= {decision.threshold:g}",
            "agreement": report.agreement,
            "decisions": report.decisions,
            "undecided": report.undecided,
        },
    }


def masks(document: Mapping[str, Any]) -> tuple[AttentionMask, ...]:
    """The masks in a certificate; older ones have none."""
    return tuple(
        AttentionMask(mask["input"], mask["padding"], tuple(mask["outputs"]))
        for mask in document["parity"].get("masks", ())
    )


def _cpu_model() -> str:
    """The processor's marketing name.

    Linux has it in ``/proc/cpuinfo``; other systems report it through ``platform``.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or "unknown"
