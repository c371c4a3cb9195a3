"""``modelport predict``: a file of rows through a model, and its answers in another file."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from modelport import predictions
from modelport.gateway.cli.declared_options import declared_by
from modelport.gateway.cli.infer import connect, protocol_option, url_option
from modelport.gateway.cli.paths import EXISTING, WRITTEN
from modelport.gateway.runtime.progress import progress_bar
from modelport.predictions import PredictOptions

EXIT_FAILED_ROWS = 1


@click.command()
@click.argument("file", metavar="INPUT", type=EXISTING)
@click.option(
    "--model",
    required=True,
    metavar="NAME|PATH",
    help="Model of the gateway at --url, else the folder or file of a model.",
)
@click.option(
    "--output",
    "-o",
    required=True,
    type=WRITTEN,
    metavar="FILE",
    help="File of answers: Parquet or JSON Lines, by its suffix.",
)
@declared_by(PredictOptions)
@url_option
@protocol_option
@click.option("--quiet", "-q", is_flag=True, help="Do not show progress.")
def predict(
    file: Path,
    model: str,
    output: Path,
    url: str | None,
    protocol: str,
    quiet: bool,
    **options: Any,
) -> None:
    """Run the rows of INPUT through a model, and write its answers, a row each.

    INPUT is Parquet, CSV, JSON Lines (an object of values by column in each line, or a request of
    one row), .npz or .npy. The model is one of a running gateway, with --url, or is served by this
    process, from its folder or file.

    \b
    modelport predict customers.parquet --model model_repository/fraud -o scores.parquet
    modelport predict images.npz --model vit --url localhost:8000 -o classes.jsonl
    modelport predict iris.csv --model iris.onnx --column x=sepal,petal -o iris.jsonl

    The answers are in the order of INPUT. A row that fails has its reason in the column 'error'.
    The rows so far are in the folder FILE.part; the same command goes on where it was killed.

    Exit status: 0 done; 1 rows have failed, or the server has gone; 2 usage; 4 a library is not
    installed.
    """
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(progress_bar(quiet))
        client = None if url is None else stack.enter_context(connect(protocol, url))
        made = predictions.predict(
            file, model=model, output=output, client=client, progress=progress, **options
        )
    resumed = f", {made.resumed} of them by an earlier run" if made.resumed else ""
    click.echo(f"{made.path}: {made.rows} rows{resumed}, {made.failed} failed")
    if made.failed:
        sys.exit(EXIT_FAILED_ROWS)
