"""Batch prediction: ``predict`` runs the rows of a file through a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict, Unpack

import click

from modelport.gateway.cli.declared_options import complete, option
from modelport.gateway.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from modelport.client import Client
    from modelport.gateway.batch_prediction.batch_run import PredictedFile as PredictedFile


class PredictOptions(TypedDict, total=False):
    """Options of ``modelport predict`` and ``modelport.predict``.

    Attributes:
        progress: is called with the stage, the work done and the whole work.
    """

    model_version: Annotated[
        int | None,
        "Version of the model.  [default: the newest that is ready]",
        click.IntRange(min=1),
    ]
    column: Annotated[
        Sequence[str],
        "Columns of an input; several are put together. Repeatable.  [default: the column with "
        "the input's name]",
        option(metavar="INPUT=COLUMN[,COLUMN...]"),
    ]
    output_name: Annotated[
        Sequence[str], "Write only this output. Repeatable.", option(metavar="NAME")
    ]
    batch_size: Annotated[
        int | None,
        "Rows of a request.  [default: the model's max_batch_size]",
        click.IntRange(min=1),
    ]
    concurrency: Annotated[int, "Requests at a time.", click.IntRange(1, 1024), option(default=4)]
    overwrite: Annotated[
        bool,
        "Replace a complete file, and drop the rows of an unfinished run with other options.",
        option(is_flag=True),
    ]
    progress: Callable[[str, int, int], None]


def predict(
    path: Path | str,
    *,
    model: Path | str,
    output: Path | str,
    client: Client | None = None,
    **options: Unpack[PredictOptions],
) -> PredictedFile:
    """Run the rows of a file through a model, and write its answers to another, a row each.

    A row that fails has its reason in the column ``error``. A call that was killed goes on when it
    is repeated.

    Args:
        path: Parquet, CSV, JSON Lines, ``.npz`` or ``.npy``.
        model: the name of a model of ``client``'s server, else a model's folder or file.
        output: Parquet or JSON Lines, by its suffix.
        options: those of ``modelport predict``.

    Raises:
        InvalidArgument: an option is wrong, or the file does not fit the model.
        NotFound: there is no such model.
        Unavailable: the server has gone, the model does not load, or the disk is full.
    """
    from modelport.gateway.batch_prediction import batch_run, input_files, output_files
    from modelport.gateway.batch_prediction.model_inputs import columns_of

    given = complete("predict", PredictOptions, options)
    columns = columns_of(given["column"])
    path, output = Path(path), Path(output)
    output_files.check(output, given["overwrite"])
    if output.exists() and path.exists() and output.samefile(path):
        raise UsageError(f"'{output}' is the file of the rows; name another one for the answers")
    with contextlib.ExitStack() as stack:
        rows = stack.enter_context(input_files.opened(path))
        read = path.stat()
        name, place = str(model), ""
        if client is None:
            client, name = stack.enter_context(_served(Path(model)))
            place = str(Path(model).absolute())
        found = batch_run.served_model(
            client, name, str(given["model_version"] or ""), given["output_name"]
        )
        run = batch_run.BatchRun(client, found, given["batch_size"], given["concurrency"])
        described = {
            "model": place or name,
            "input": [str(path.absolute()), read.st_size, read.st_mtime_ns],
        }
        show = options.get("progress", _silent)
        return run.predict(rows, output, columns, described, given["overwrite"], show)


def _silent(stage: str, done: int, total: int) -> None:
    pass


@contextlib.contextmanager
def _served(path: Path) -> Iterator[tuple[Client, str]]:
    """A client of a model that this process serves on the loopback interface, and its name."""
    from modelport.client import Client
    from modelport.gateway.repository import config
    from modelport.server import Server

    if not path.exists():
        raise UsageError(
            f"'{path}' does not exist; name a model's folder or file, or give --url for one of a "
            "running gateway"
        )
    place = path.absolute()
    if path.is_dir():
        if place.name.isdigit() and not (path / config.FILENAME).exists():
            raise UsageError(
                f"'{path}' is a version; give the model's folder, '{place.parent}', and "
                f"--model-version {place.name}"
            )
        # The models of a pipeline's steps are beside it.
        server = Server(
            model_repository=place.parent,
            model_control_mode="explicit",
            load_model=[place.name],
            exit_on_error=True,
        )
    else:
        server = Server(path, exit_on_error=True)
    try:
        server.start()
    except Unavailable as error:
        raise type(error)(
            f"{error}; if it needs options of 'modelport serve', start that, and give --url"
        ) from error
    try:
        with Client(server.http_url) as client:
            yield client, place.name if path.is_dir() else client.models()[0].name
    finally:
        server.stop()
