"""``certificate.json``: what was proven about an artifact, how, and on what.

It names no path, host or user, so that it can be shipped with the model.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway import __version__
from gateway.repository.manifest import files_of, sha256_of

if TYPE_CHECKING:
    from exporters.checkpoint import Checkpoint
    from exporters.parity import ParityReport

FILENAME = "certificate.json"
FORMAT = "modelport-certificate/1"


def certify(
    *,
    model: str,
    format_name: str,
    opset: int | None,
    dtype: str,
    libraries: Sequence[str],
    checkpoint: Checkpoint,
    model_kwargs: Mapping[str, Any],
    report: ParityReport,
    artifact: Path,
) -> dict[str, Any]:
    """The certificate's content; ``artifact`` is the folder whose files it vouches for."""
    return {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {"name": model, "model_kwargs": dict(model_kwargs)},
        "checkpoint": {"file": checkpoint.filename, "sha256": checkpoint.sha256},
        "artifact": {
            "format": format_name,
            "opset": opset,
            "dtype": dtype,
            "files": {
                name: {"sha256": sha256_of(artifact / name)}
                for name in files_of(artifact)
                if name != FILENAME
            },
        },
        "parity": _parity(report),
        "versions": {
            "modelport": __version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("numpy", *libraries)},
        },
        "hardware": {
            "cpu": _cpu_model(),
            "machine": platform.machine(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        },
    }


def _parity(report: ParityReport) -> dict[str, Any]:
    decision = report.decision
    return {
        "passed": True,
        "seed": report.seed,
        "samples": report.samples,
        "edge_samples": report.edge_samples,
        "edge_cases": "axes shortest and longest; values at their minimum and maximum",
        "batch_sizes": sorted(report.batch_sizes),
        "axis_sizes": {name: sorted(sizes) for name, sizes in report.axis_sizes.items()},
        "tolerance": {"atol": report.atol, "rtol": report.rtol},
        "outputs": {
            name: {
                "max_abs_error": output.max_abs_error,
                "mean_abs_error": output.mean_abs_error,
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
        },
    }


def _cpu_model() -> str:
    """The processor's marketing name; Linux keeps it in one file, elsewhere Python knows some."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or "unknown"
