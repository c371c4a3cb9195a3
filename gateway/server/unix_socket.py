"""UNIX domain sockets to listen on, as files."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from modelport.gateway.errors import Unavailable, plain_reason
from modelport.gateway.runtime import file_lock
from modelport.gateway.server.listening_socket import BACKLOG
from modelport.gateway.settings import Settings


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """A socket that listens; ``remove`` removes its file, so that no further client finds it."""

    socket: socket.socket
    remove: Callable[[], None]

    def close(self) -> None:
        """Stop listening."""
        self.remove()
        self.socket.close()


def listen(place: Path | int | None, flag: str, mode: int) -> UnixSocket | None:
    """Listen on a path, or on the descriptor of a socket on which the parent process listens.

    A file that a process left behind when it was killed is replaced. The file never has more
    permissions than ``mode``; to connect takes permission to write.

    Raises:
        Unavailable: Another process listens there, or the path cannot be used.
    """
    if place is None:
        return None
    if isinstance(place, int):
        inherited = socket.socket(fileno=place)
        inherited.setblocking(False)
        inherited.set_inheritable(False)
        return UnixSocket(inherited, lambda: None)  # the parent's file
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.setblocking(False)
    try:
        # Another process may find the same stale file, and would remove the socket of this one.
        with file_lock.locked(place):
            _remove_stale(place)
            umask = os.umask(0o777 & ~mode)
            try:
                bound.bind(os.fspath(place))
            finally:
                os.umask(umask)
            bound.listen(BACKLOG)
        return UnixSocket(bound, partial(_remove, place, _inode(place)))
    except OSError as error:
        bound.close()
        reason = plain_reason(error).lower()
        raise Unavailable(f"cannot listen on {place}: {reason}; choose another {flag}") from error


def listen_all(settings: Settings) -> dict[str, UnixSocket]:
    """Listen on the sockets that workers share; the result is by the name of the setting.

    Raises:
        Unavailable: As ``listen``.
    """
    sockets: dict[str, UnixSocket] = {}
    try:
        for name in ("http_socket", "grpc_socket"):
            flag = f"--{name.replace('_', '-')}"
            found = listen(getattr(settings, name), flag, settings.socket_mode)
            if found is not None:
                sockets[name] = found
    except Unavailable:
        for each in sockets.values():
            each.close()
        raise
    return sockets


def _remove(path: Path, made: tuple[int, int]) -> None:
    """Remove the file, unless another process has replaced it."""
    with contextlib.suppress(OSError):
        if _inode(path) == made:
            path.unlink()


def _inode(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _remove_stale(path: Path) -> None:
    """Remove a socket on which no process listens."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError("it exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # its backlog is full
    raise FileExistsError("another process listens on it")
