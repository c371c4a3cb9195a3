"""``modelport export``: from a checkpoint to a proven, published version.

Importing this imports neither torch nor a runtime, so that ``--help`` is instant.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporters.errors import OneLineCommand, UsageError, missing_extra
from exporters.models import REGISTRY

if TYPE_CHECKING:
    from exporters.pipeline import ExportResult


@click.command(cls=OneLineCommand)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--model",
    required=True,
    metavar="|".join([*REGISTRY, "package.module:factory"]),
    help="A registered model, or any factory of a module that declares a ModelSpec.",
)
@click.option("--format", required=True, metavar="onnx", help="The artifact's format.")
@click.option("--model-kwargs", metavar="JSON", help="Hyper-parameters; win over the checkpoint's.")
@click.option("--name", help="The model's name in the repository.  [default: the spec's]")
@click.option(
    "--repository",
    type=click.Path(path_type=Path),
    default=Path("model_repository"),
    show_default=True,
    help="The model repository to publish into.",
)
@click.option("--model-version", default="auto", show_default=True, metavar="N|auto")
@click.option("--max-batch-size", type=click.IntRange(1), default=8, show_default=True)
@click.option("--opset", type=int, help="ONNX operator set.  [default: 20]")
@click.option("--atol", type=click.FloatRange(0), help="Absolute tolerance.  [default: the spec's]")
@click.option("--rtol", type=click.FloatRange(0), help="Relative tolerance.  [default: the spec's]")
@click.option(
    "--samples",
    type=click.IntRange(1),
    help="Inputs to compare on.  [default: 1000, fewer above 5 million parameters]",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--dtype", default="fp32", show_default=True, help="Precision of the artifact.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Write the artifact and its certificate here instead of publishing.",
)
def export(
    model_kwargs: str | None, model_version: str, samples: int | None, **options: Any
) -> None:
    """Export CHECKPOINT, prove the artifact equal to it, and publish it.

    Exit codes: 0 done, 2 usage, 3 parity, 4 unsupported, 5 integrity.
    """
    kwargs = _parse_kwargs(model_kwargs)
    for tolerance in ("atol", "rtol"):
        _check_finite(tolerance, options[tolerance])
    with _progress() as progress:
        # torch and the runtime come with this import.
        progress("starting", 0, 0)
        try:
            from exporters import pipeline, publish
        except ImportError as error:
            raise missing_extra(error) from error

        request = pipeline.ExportRequest(
            model_kwargs=kwargs,
            version=publish.parse_version(model_version),
            samples=samples,
            **options,
        )
        result = pipeline.export(request, progress)
    _print(result)


def _parse_kwargs(text: str | None) -> dict[str, Any]:
    try:
        kwargs = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--model-kwargs is not JSON: {error}") from error
    if not isinstance(kwargs, dict):
        raise UsageError("--model-kwargs must be a JSON object, such as '{\"nhead\": 4}'")
    return kwargs


def _check_finite(name: str, value: float | None) -> None:
    """A tolerance of NaN or infinity would prove nothing."""
    if value is not None and not value < float("inf"):
        raise UsageError(f"--{name} must be a finite number")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr that follows the stages; nothing where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=None)

        def show(stage: str, done: int, total: int) -> None:
            bar.tasks[task].total = total or None  # update() would take None for "as before"
            bar.update(task, description=stage, completed=done)

        yield show


def _print(result: ExportResult) -> None:
    report = result.report
    agreement = "none declared" if report.agreement is None else f"{report.agreement:.2%}"
    rows = {
        "model": result.name,
        "version": "not published" if result.version is None else str(result.version),
        "path": str(result.path),
        "size": f"{result.size_bytes / 1e6:.2f} MB",
        "max error": f"{report.max_abs_error:.2e} (tolerance {report.atol:g} + {report.rtol:g} * "
        f"|reference|, {report.samples + report.edge_samples} samples)",
        "agreement": agreement,
        "seconds": f"{result.seconds:.1f}",
    }
    for label, value in rows.items():
        click.echo(f"{label:<10} {value}")
