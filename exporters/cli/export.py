"""``modelport export``: export a checkpoint as a proven, published version.

This module imports neither torch nor a runtime, which keeps ``--help`` fast.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from modelport.exporters import api
from modelport.exporters.options import IMAGE_FLAGS, ExportOptions
from modelport.exporters.runtime.interruption import InterruptibleCommand
from modelport.gateway.cli.declared_options import declared_by
from modelport.gateway.cli.paths import EXISTING
from modelport.gateway.errors import UsageError
from modelport.gateway.runtime.progress import progress_bar

if TYPE_CHECKING:
    from modelport.exporters.export_pipeline import ExportResult
    from modelport.exporters.optimization.result import GraphOptimization

NAMED = 3  # how many limits are listed


@click.command(cls=InterruptibleCommand)
@click.argument("checkpoint", type=EXISTING)
@declared_by(ExportOptions)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--quiet", "-q", is_flag=True, help="Do not show progress.")
def export(**options: Any) -> None:
    """Export CHECKPOINT, prove each artifact equal to it, and publish it.

    CHECKPOINT is a .pt, .pth or .safetensors file, a Hugging Face folder, a .keras file, a
    SavedModel, or a model of XGBoost (.ubj, .json), LightGBM (.txt), CatBoost
    (.json) or scikit-learn (.skops). All formats are proven before any is published.

    Exit codes: 0 done, 2 usage, 3 parity, 4 unsupported, 5 integrity.
    """
    given, as_json, quiet = arguments(options)
    with progress_bar(quiet) as progress:
        # torch and the runtime come with this call.
        progress("starting", 0, 0)
        results = api.export(**given, progress=progress)
    show(results, as_json)


def arguments(options: dict[str, Any]) -> tuple[dict[str, Any], bool, bool]:
    """The arguments of ``api.export`` for these options, and ``--json`` and ``--quiet``."""
    given = dict(options)
    given["model_kwargs"] = parse_kwargs(given["model_kwargs"])
    as_json, quiet = given.pop("as_json"), given.pop("quiet")
    images = {name: given.pop(f"image_{name}") for name in IMAGE_FLAGS}
    given["image"] = {name: value for name, value in images.items() if value is not None}
    return given, as_json, quiet


def show(results: Sequence[ExportResult], as_json: bool) -> None:
    """Print what was exported."""
    if as_json:
        click.echo(json.dumps([_document(result) for result in results], indent=2))
    else:
        _print(results)


def parse_kwargs(text: str | None) -> dict[str, Any]:
    """Parse ``--model-kwargs``; raise ``UsageError`` unless it is a JSON object."""
    try:
        kwargs = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--model-kwargs is not JSON: {error}") from error
    if not isinstance(kwargs, dict):
        raise UsageError("--model-kwargs must be a JSON object, such as '{\"nhead\": 4}'")
    return kwargs


def _document(result: ExportResult) -> dict[str, Any]:
    report, found, usage = result.proof.report, result.proof.evaluation, result.proof.usage
    return {
        "model": result.name,
        "format": result.format,
        "precision": result.precision,
        "version": result.version,
        "path": str(result.path),
        "size_bytes": result.size_bytes,
        "samples": report.samples + report.edge_samples,
        "max_abs_error": report.max_abs_error,
        "tolerance": {"atol": report.atol, "rtol": report.rtol},
        "conditioning": {
            name: dataclasses.asdict(one) for name, one in report.conditioning.items()
        },
        "ranges": report.ranges,
        "limits": [dataclasses.asdict(limit) for limit in report.limits],
        "agreement": report.agreement,
        "evaluation": None if found is None else dataclasses.asdict(found),
        "optimization": None
        if result.proof.optimization is None
        else dataclasses.asdict(result.proof.optimization),
        "seconds": round(result.seconds, 3),
        "peak_memory_bytes": usage.peak_memory_bytes,
        "notices": list(result.notices),
    }


def _print(results: Sequence[ExportResult]) -> None:
    for number, result in enumerate(results):
        if number:
            click.echo()
        report, found = result.proof.report, result.proof.evaluation
        held_to = f"tolerance {report.atol:g} + {report.rtol:g} * |reference|"
        if report.bounds is not None:
            relative = max(output.relative_error for output in report.outputs.values())
            held_to = f"{relative:.2%} of the values' norm"
        agreement = "none declared" if report.agreement is None else f"{report.agreement:.2%}"
        rows = {
            "model": f"{result.name} ({result.format} {result.precision})",
            "version": "not published" if result.version is None else str(result.version),
            "path": str(result.path),
            "size": f"{result.size_bytes / 1e6:.2f} MB",
            "max error": f"{report.max_abs_error:.2e} ({held_to}, "
            f"{report.samples + report.edge_samples} samples)",
            "agreement": agreement,
        }
        sensitive = [
            f"output '{name}': rounding alone moves it by {one.worst:.3g} times the tolerance; "
            f"up to {one.tolerance:.3g} times are accepted"
            for name, one in report.conditioning.items()
        ]
        if sensitive:
            rows["sensitive"] = "; ".join(sensitive)
        if report.ranges:
            served = (f"{name} {low}..{high}" for name, (low, high) in report.ranges.items())
            rows["ranges"] = f"{', '.join(served)} (found by trial; others are not served)"
        if report.limits:
            rest = len(report.limits) - NAMED
            rows["limits"] = "; ".join(map(str, report.limits[:NAMED])) + (
                f"; and {rest} more in the certificate" if rest > 0 else ""
            )
        if found is not None:
            parts = []
            if found.metric is not None:
                parts.append(
                    f"{found.metric} {found.artifact:.4f} (checkpoint {found.reference:.4f})"
                )
            if found.agreement is not None:
                parts.append(f"agreement {found.agreement:.2%}")
            else:
                parts.append(f"{found.relative_error:.2%} of the values' norm")
            rows["held out"] = f"{', '.join(parts)}, {found.rows} rows"
        if result.proof.optimization is not None:
            rows |= optimization_rows(result.proof.optimization)
        usage = result.proof.usage
        rows["seconds"] = (
            f"{result.seconds:.1f} (conversion {usage.seconds:.1f}, peak memory "
            f"{usage.peak_memory_bytes / 1e9:.1f} GB)"
        )
        if result.notices:
            rows["note"] = "; ".join(result.notices)
        for label, value in rows.items():
            click.echo(f"{label:<10} {value}")


def optimization_rows(found: GraphOptimization) -> dict[str, str]:
    """The rows that say how a graph was changed, and how much faster it is."""
    rows = {
        "optimised": f"{found.operators_before} operators before, {found.operators_after} now; "
        f"{found.size_bytes_before / 1e6:.2f} MB before, {found.size_bytes_after / 1e6:.2f} MB now",
    }
    if found.fused:
        rows["operators"] = ", ".join(f"{count} {name}" for name, count in found.fused.items())
    for one in found.speedup:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in one.shapes.items())
        rows[f"speed-up {one.batch or ''}"] = (
            f"{one.ratio:.2f}x (middle half {one.low:.2f} to {one.high:.2f}) on {shapes}"
        )
    return rows
