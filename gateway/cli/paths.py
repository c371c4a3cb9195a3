"""Types of path arguments. They are checked when the command line is read, before slow imports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from modelport.gateway.repository.storage.location import Location, Repository

#: A file or folder that the command reads.
EXISTING = click.Path(exists=True, path_type=Path)


class WrittenPath(click.Path):
    """A file or folder that the command writes; folders above it may be missing."""

    def __init__(self, dir_okay: bool = True) -> None:
        super().__init__(dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        path = super().convert(value, param, ctx)
        reason = unwritable(Path(os.fsdecode(path)))
        if reason:
            self.fail(reason, param, ctx)
        return path


#: A file that the command writes.
WRITTEN = WrittenPath(dir_okay=False)


class ExistingRepository(Repository):
    """A model repository, or what is in one, that the command reads; a default may be absent."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Path | Location:
        if isinstance(value, Path):
            return value
        found = super().convert(value, param, ctx)
        return found if isinstance(found, Location) else Path(EXISTING.convert(found, param, ctx))


class WrittenRepository(Repository):
    """A model repository that the command writes."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Path | Location:
        found = super().convert(value, param, ctx)
        reason = unwritable(found) if isinstance(found, Path) else ""
        if reason:
            self.fail(reason, param, ctx)
        return found


def unwritable(path: Path) -> str:
    """The reason why nothing can be written at ``path``; empty if something can."""
    for folder in (path, *path.absolute().parents):
        if not os.path.lexists(folder):
            continue
        if folder != path and not folder.is_dir():
            return f"'{path}' cannot be written: '{folder}' is not a folder"
        if not os.access(folder, os.W_OK):
            return f"'{path}' cannot be written: you may not write to '{folder}'"
        break
    return ""
