"""Folders for unfinished files; what a killed process leaves is removed by the next one."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from modelport.exporters.runtime.file_errors import STAGING_PREFIX
from modelport.exporters.runtime.interruption import finally_call


@contextlib.contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder in ``parent``, or among the system's temporary ones, and remove it.

    A living process holds a lock on its folder.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _sweep(parent)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=parent))
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # a sweeper was faster than this lock
            continue
        try:
            with finally_call(functools.partial(shutil.rmtree, folder, ignore_errors=True)):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if not folder.exists():  # likewise
                    continue
                yield folder
                return
        finally:
            os.close(descriptor)


def _sweep(parent: Path) -> None:
    """Remove the folders of dead processes."""
    for folder in parent.glob(f"{STAGING_PREFIX}*"):
        with contextlib.suppress(OSError):  # locked by a living process, or removed meanwhile
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
