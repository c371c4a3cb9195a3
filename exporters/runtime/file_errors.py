"""Errors of writing files: the place, the reason, and the remedy for that reason."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

from modelport.gateway.errors import UsageError, first_line
from modelport.gateway.repository.storage.location import Location

#: Names of folders for unfinished files begin with it.
STAGING_PREFIX = ".modelport-"

_REMEDIES = {
    errno.EROFS: "mount it for writing",
    errno.EACCES: "let {user} write there",
    errno.EPERM: "let {user} write there",
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free some of the quota there",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EEXIST: "move that file away",
    errno.ENOTDIR: "move that file away",
}


@contextlib.contextmanager
def writing_to(place: Path | Location, otherwise: str) -> Iterator[None]:
    """Raise ``UsageError`` in place of an ``OSError`` in the block.

    Args:
        otherwise: what else helps, such as "choose another --repository".
    """
    try:
        yield
    except OSError as error:
        raise explained(place, error, otherwise) from error


def explained(place: Path | Location, error: OSError, otherwise: str) -> UsageError:
    """``error`` with the folder that refuses and the remedy; arguments as in ``writing_to``."""
    reason = error.strerror or first_line(error)
    refused = _refused(place, error)
    if isinstance(place, Location) or not _overlap(refused, place):
        if refused.is_file():
            return UsageError(f"'{refused}' cannot be read: {reason}")
        place, otherwise = refused, "set TMPDIR to another folder"
    where = "" if refused == place else f" in '{refused}'"
    remedy = _REMEDIES.get(error.errno or 0, "").format(user=_user())
    return UsageError(
        f"cannot write to '{place}': {reason}{where}; {f'{remedy}, or ' if remedy else ''}"
        f"{otherwise}"
    )


def _refused(place: Path | Location, error: OSError) -> Path:
    """The file or folder that ``error`` is about, or the nearest around it that exists.

    Folders for unfinished files do not count.
    """
    named = error.filename2 or error.filename
    if isinstance(named, str):
        path = Path(named)
    elif isinstance(place, Location) or error.errno == errno.ENOENT:  # tempfile found no folder
        path = Path(os.environ.get("TMPDIR", "/tmp"))
    else:
        path = place
    for folder in (path, *path.parents):
        staged = any(part.startswith(STAGING_PREFIX) for part in folder.parts)
        if os.path.lexists(folder) and not staged:
            return folder
    return path


def _overlap(a: Path, b: Path) -> bool:
    """Whether one of the paths lies in the other."""
    a, b = a.absolute(), b.absolute()
    return a.is_relative_to(b) or b.is_relative_to(a)


def _user() -> str:
    try:
        return f"user '{pwd.getpwuid(os.geteuid()).pw_name}'"
    except KeyError:
        return f"user {os.geteuid()}"
