"""``modelport convert``: convert weights between Keras and PyTorch, and prove them equal.

This module imports neither torch nor TensorFlow, which keeps ``--help`` fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelport.exporters import api
from modelport.exporters.cli.export import parse_kwargs
from modelport.exporters.options import ConvertOptions
from modelport.exporters.runtime.interruption import InterruptibleCommand
from modelport.gateway.cli.declared_options import declared_by
from modelport.gateway.cli.paths import WRITTEN
from modelport.gateway.cli.tables import print_table
from modelport.gateway.runtime.progress import progress_bar

if TYPE_CHECKING:
    from modelport.exporters.keras_conversion.report import ConversionReport

ROWS_SHOWN = 40  # rows printed; the report has every tensor


@click.command(cls=InterruptibleCommand)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=WRITTEN)
@click.option("--model", required=True, metavar="fraud|vit", help="Model that has a Keras port.")
@declared_by(ConvertOptions)
def convert(
    source: Path, target: Path, model: str, model_kwargs: str | None, **options: Any
) -> None:
    """Convert the weights in SOURCE to TARGET, and prove that both are the same model.

    One is a PyTorch checkpoint (.pt, .pth, .safetensors), the other a Keras file (.keras,
    .weights.h5). Every tensor is compared, and the outputs for random inputs; a mean absolute error
    above 0.01 is refused. The report is stored beside TARGET as TARGET.report.json.

    Exit codes: 0 done, 2 usage, 3 not the same model, 4 unsupported, 5 integrity.
    """
    kwargs = parse_kwargs(model_kwargs)
    with progress_bar() as progress:
        progress("starting", 0, 0)
        result = api.convert(
            source, target, model=model, model_kwargs=kwargs, progress=progress, **options
        )
    _print(result, target)


def _print(result: ConversionReport, target: Path) -> None:
    from modelport.exporters.keras_conversion.report import path_of

    head = ("tensor", "shape", "L2 source", "L2 target", "max difference")
    rows = []
    for row in result.tensors[:ROWS_SHOWN]:
        norms = [f"{norm or 0:.6g}" for norm in row.norms]
        shape = "x".join(map(str, row.source_shape or ()))
        rows.append((str(row.tensor), shape, *norms, f"{row.max_abs_error or 0:.3g}"))
    print_table(head, rows, numbers=head[1:])
    more = len(result.tensors) - ROWS_SHOWN
    if more > 0:
        click.echo(f"... and {more} more, all equal")
    click.echo()
    for output in result.outputs:
        click.echo(
            f"{output.name:<10} mean difference {output.mean_abs_error:.3g}, largest "
            f"{output.max_abs_error:.3g}, over {result.samples} inputs"
        )
    click.echo(f"{'target':<10} {target}")
    click.echo(f"{'report':<10} {path_of(target)}")
    for warning in result.warnings:
        click.echo(f"modelport: warning: {warning}", err=True)
