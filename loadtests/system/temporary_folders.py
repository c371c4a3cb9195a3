"""Temporary folders that are removed even after their process was killed.

SIGKILL leaves no chance to clean up. So each process locks its folders, and the next one that makes
a folder of the same kind removes those without a lock. Unlike a process number, a lock also works
between containers that share a disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

LOCK = ".lock"


@contextlib.contextmanager
def folder(prefix: str) -> Iterator[Path]:
    """Make a folder whose name begins with ``prefix``, removed after the block.

    Raises:
        OSError: there is no room for it.
    """
    sweep(prefix)
    path = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        lock = _held(path / LOCK)
        try:
            yield path
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _held(path: Path) -> int:
    lock = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, b"held\n")
    except OSError as error:
        os.close(lock)
        raise OSError(error.errno, error.strerror, str(path)) from error
    return lock


def sweep(prefix: str) -> None:
    """Remove the folders of killed processes."""
    for lock in Path(tempfile.gettempdir()).glob(f"{prefix}*/{LOCK}"):
        with contextlib.suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_size:  # otherwise it is just being made
                shutil.rmtree(lock.parent, ignore_errors=True)
