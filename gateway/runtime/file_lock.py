"""Locks between processes on what a path names, which may be replaced meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of ``path``, after other processes have released it.

    The lock is a file of its own beside ``path``, ``.NAME.lock``, which exists while somebody holds
    it. Other users cannot open it, and so cannot hold the lock.

    Raises:
        OSError: The folder cannot be written, or another user's file is in the lock's place.
    """
    name = path.with_name(f".{path.name}.lock")
    descriptor = _lock(name)
    while not _is_at(descriptor, name):  # its last holder has removed it
        os.close(descriptor)
        descriptor = _lock(name)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            name.unlink()
        os.close(descriptor)


def _lock(name: Path) -> int:
    flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(descriptor: int, name: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), name.lstat())
    return False
