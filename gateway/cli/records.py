"""``modelport records``: list recorded traffic, and delete what is old."""

from __future__ import annotations

import itertools
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote

import click

from modelport.gateway.cli.errors import OneLineGroup
from modelport.gateway.cli.key import read_duration
from modelport.gateway.cli.paths import ExistingRepository
from modelport.gateway.cli.tables import print_table
from modelport.gateway.errors import UsageError
from modelport.gateway.recording.record_encryption import record_key_option
from modelport.gateway.repository.storage.location import Location

#: A file that is being written is left alone until nothing has changed it for so long.
PART_SECONDS = 2 * 3600.0


@click.group(cls=OneLineGroup)
def records() -> None:
    """List recorded traffic, and delete what is old."""


_where = click.argument("where", metavar="RECORDS", type=ExistingRepository())
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@records.command()
@_where
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Show the first N requests, with their status and duration.",
)
@record_key_option
@_json
def show(where: Path | Location, limit: int | None, as_json: bool) -> None:
    """Show the files of RECORDS by model.

    RECORDS is a folder of 'modelport serve --record', a model's folder, or s3://BUCKET/PREFIX.
    """
    if limit is not None:
        _show_requests(where, limit, as_json)
        return
    from modelport.gateway.recording.record_files import NO_MODEL, files_in

    rows: dict[str, list[float]] = {}
    for each in files_in(where):
        model = unquote(each.key.rpartition("/")[0])
        row = rows.setdefault("" if model == NO_MODEL else model, [0, 0, each.modified_at, 0.0])
        row[0] += 1
        row[1] += each.size
        row[2], row[3] = min(row[2], each.modified_at), max(row[3], each.modified_at)
    if as_json:
        keys = ("files", "bytes", "oldest", "newest")
        found = [
            {"model": model} | dict(zip(keys, [int(row[0]), int(row[1]), *row[2:]], strict=True))
            for model, row in sorted(rows.items())
        ]
        click.echo(json.dumps(found, indent=2))
        return
    print_table(
        ("model", "files", "MB", "oldest", "newest"),
        [
            (model or "-", f"{row[0]:.0f}", f"{row[1] / 1e6:.1f}", _day(row[2]), _day(row[3]))
            for model, row in sorted(rows.items())
        ],
        numbers=("files", "MB"),
    )


def _show_requests(where: Path | Location, count: int, as_json: bool) -> None:
    from modelport.gateway.recording.record_reader import read
    from modelport.gateway.recording.recorded_calls import tell

    found = list(itertools.islice(read(where, tell), count))
    if as_json:
        rows = [{"id": each.id, "time": each.at, **each.data} for each in found]
        try:
            click.echo(json.dumps(rows))
        except RecursionError as error:
            raise UsageError(
                f"'{where}' has a record that is nested too deeply; show it without --json"
            ) from error
        return
    print_table(
        ("time", "model", "dialect", "target", "status", "ms"),
        [
            (
                datetime.fromtimestamp(each.at, UTC).isoformat(sep=" ", timespec="milliseconds"),
                each.model or "-",
                str(each.data.get("dialect", "-")),
                each.target[:80],
                str(each.status or each.grpc_status),
                _milliseconds(each.data.get("duration_us")),
            )
            for each in found
        ],
        numbers=("ms",),
    )


@records.command()
@_where
@click.option("--older-than", metavar="AGE", help="Delete files last written before: 12h, 30d.")
@click.option(
    "--max-size",
    type=click.IntRange(min=0),
    metavar="BYTES",
    help="Delete the oldest files until the others take at most this.",
)
def prune(where: Path | Location, older_than: str | None, max_size: int | None) -> None:
    """Delete the oldest files of RECORDS.

    Files that a gateway is writing stay.
    """
    from modelport.gateway.recording import record_files

    if older_than is None and max_size is None:
        raise UsageError("nothing to delete by; give --older-than AGE, --max-size BYTES or both")
    before = None
    if older_than is not None:
        before = time.time() - read_duration(older_than, "--older-than").total_seconds()
    try:
        gone = record_files.prune(where, max_size, before, PART_SECONDS)
    except OSError as error:
        raise UsageError(
            f"'{where}' cannot be pruned: {str(error.strerror).lower()}; run it as the user of the "
            "gateway"
        ) from error
    click.echo(f"deleted {len(gone)} files, {sum(each.size for each in gone) / 1e6:.1f} MB")


def _day(at: float) -> str:
    return (
        datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="minutes")[:16] if at else "-"
    )


def _milliseconds(microseconds: object) -> str:
    return f"{microseconds / 1000:.1f}" if isinstance(microseconds, int) else "-"
