"""``modelport key``: API keys that identify the callers of a gateway."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from modelport.gateway.access import api_key_file
from modelport.gateway.access.api_key_file import ApiKey, Entries
from modelport.gateway.access.operations import Operation
from modelport.gateway.cli.errors import OneLineGroup
from modelport.gateway.cli.paths import WRITTEN
from modelport.gateway.cli.tables import print_table
from modelport.gateway.errors import UsageError

DEFAULT_FILE = "keys.toml"
#: Operations of a key with ``--models`` and without ``--operations``.
DEFAULT_OPERATIONS = (Operation.INFER, Operation.METADATA)
DEFAULT_OVERLAP = "24h"
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_DURATION = re.compile(r"(\d{1,6})([smhdw])")
_NEVER = "never"
_LONGEST = timedelta(days=100_000)

_file_option = click.option(
    "--file", "file", type=WRITTEN, metavar="FILE",
    default=DEFAULT_FILE, show_default=True, help="The key file that access.toml names.",
)  # fmt: skip
_expires_option = click.option(
    "--expires", metavar="WHEN",
    help="When the key expires: 90d, 12h, 2030-01-31 (UTC), or never.",
)  # fmt: skip


@click.group(cls=OneLineGroup)
def key() -> None:
    """Make, list, replace and revoke API keys.

    \b
    modelport key create --name ci --models 'fraud*' --expires 90d
    curl -H 'Authorization: Bearer mp_...' ...

    The file holds hashes of the keys, and a running gateway reloads it after each change.
    """


@key.command()
@click.option("--name", required=True, help="Name of the caller in the rules.")
@click.option("--models", metavar="GLOB[,...]", multiple=True,
              help="Models that the key may use; repeatable.  [default: none, or all with "
                   "--operations]")  # fmt: skip
@click.option("--operations", metavar="NAME[,...]", multiple=True,
              help=f"Operations that the key allows: {', '.join(Operation)}, or '*'.  [default: "
                   "none, or infer,metadata with --models]")  # fmt: skip
@_expires_option
@_file_option
def create(
    name: str,
    models: tuple[str, ...],
    operations: tuple[str, ...],
    expires: str | None,
    file: Path,
) -> None:
    """Make a key, and print it once.

    Without --models and --operations, the key has the rights that rules give to NAME. With them, it
    has these rights as well.
    """
    now = datetime.now(UTC)
    globs = split(models)
    allowed = split(operations) or (DEFAULT_OPERATIONS if globs else ())
    text, entry = api_key_file.generate(
        name, expires=read_expiry(expires, now), operations=allowed, models=globs
    )
    with api_key_file.locked(file) as replace:
        entries = api_key_file.add(_entries(file), entry, now)
        _show_new(text, entry, file)  # before it is valid: it cannot be shown later
        replace(entries)


@key.command()
@click.argument("name")
@click.option("--overlap", metavar="DURATION", default=DEFAULT_OVERLAP, show_default=True,
              help="Time during which the old key is valid too: 24h, 7d.")  # fmt: skip
@_expires_option
@_file_option
def rotate(name: str, overlap: str, expires: str | None, file: Path) -> None:
    """Replace the key of NAME, and print the new one once.

    It has the rights of the old key, and its lifetime, unless --expires says otherwise. The old key
    stays valid for --overlap; a name has two valid keys at most.
    """
    now = datetime.now(UTC)
    length = read_duration(overlap, "--overlap")
    with api_key_file.locked(file) as replace:
        entries = _entries(file)
        end = _end_like(entries, name, now) if expires is None else read_expiry(expires, now)
        text, entries = api_key_file.rotate(entries, name, end, length, now)
        _show_new(text, entries[-1], file)
        replace(entries)
    click.echo(f"the old key is valid for another {overlap} at most", err=True)


@key.command()
@click.argument("name_or_id", metavar="NAME|ID")
@_file_option
def revoke(name_or_id: str, file: Path) -> None:
    """Remove all keys of NAME, or the key ID."""
    with api_key_file.locked(file) as replace:
        kept, gone = api_key_file.revoke(_entries(file, must_exist=True), name_or_id)
        replace(kept)
    for entry in gone:
        click.echo(f"revoked {entry.id} of '{entry.name}'")


@key.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_file_option
def list_command(file: Path, as_json: bool) -> None:
    """List names, rights and expiry of the keys."""
    now = datetime.now(UTC)
    rows = [_row(entry, now) for entry in _entries(file, must_exist=True)]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    head = ("name", "id", "state", "created", "expires", "operations", "models")
    cells = [[_cell(row[title]) for title in head] for row in rows]
    print_table(head, cells, colours={"valid": "green", "expired": "red"})


# -- options --------------------------------------------------------------------------------------


def split(values: Iterable[str]) -> tuple[str, ...]:
    """The parts of repeated options with commas."""
    parts = (part.strip() for value in values for part in value.split(","))
    return tuple(dict.fromkeys(part for part in parts if part))


def read_duration(text: str, option: str) -> timedelta:
    """Read a duration such as ``90d``.

    Raises:
        UsageError: It is not one.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise UsageError(f"{option} '{text}' is not a duration, such as 30m, 12h or 90d")
    length = timedelta(**{_UNITS[found[2]]: int(found[1])})
    if length > _LONGEST:
        raise UsageError(f"{option} '{text}' is too long; use 100000d at most")
    return length


def read_expiry(text: str | None, now: datetime) -> datetime | None:
    """Read the time after which a key is refused; None for never.

    Raises:
        UsageError: It is not one, or is in the past.
    """
    if text is None or text == _NEVER:
        return None
    try:
        if _DURATION.fullmatch(text):
            end = now + read_duration(text, "--expires")
        else:
            end = datetime.fromisoformat(text)
            end = end.replace(tzinfo=UTC) if end.tzinfo is None else end.astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(
            f"--expires '{text}' is not a time, such as 90d, 12h, 2030-01-31 or never"
        ) from None
    if end <= now:
        raise UsageError(f"--expires '{text}' is in the past; give a time in the future")
    return end.replace(microsecond=0)


def _end_like(entries: Entries, name: str, now: datetime) -> datetime | None:
    """The end of a new key that lives as long as the key of ``name``."""
    newest = next((entry for entry in reversed(entries) if entry.name == name), None)
    if newest is None or newest.expires is None or newest.created is None:
        return None
    return (now + (newest.expires - newest.created)).replace(microsecond=0)


# -- the file and the screen ----------------------------------------------------------------------


def _entries(file: Path, must_exist: bool = False) -> Entries:
    if not must_exist and not file.exists():
        return ()
    return api_key_file.read(file, "--file")


def _show_new(text: str, entry: ApiKey, file: Path) -> None:
    """Print the key on standard output, and all else on standard error."""
    click.echo(text)
    end = "never" if entry.expires is None else _cell(entry.expires)
    click.echo(
        f"key {entry.id} of '{entry.name}', expires: {end}; {click.format_filename(file)} holds "
        "its hash only; the key is not shown again",
        err=True,
    )
    if not entry.operations:
        click.echo(f"it has the rights that the rules give to '{entry.name}'", err=True)


def _row(entry: ApiKey, now: datetime) -> dict[str, Any]:
    return {
        "name": entry.name,
        "id": entry.id,
        "state": "valid" if entry.is_valid(now) else "expired",
        "created": None if entry.created is None else _cell(entry.created),
        "expires": None if entry.expires is None else _cell(entry.expires),
        "operations": list(entry.operations),
        "models": list(entry.models or (("*",) if entry.operations else ())),
    }


def _cell(value: Any) -> str:
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ", ".join(value) if isinstance(value, list) else value or ""
