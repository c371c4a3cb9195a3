"""Functions that the process of a trial calls; the module imports little, as each process does."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

from modelport.gateway.errors import Unavailable, Unsupported


def passes(file: Path, **arguments: Any) -> None:
    assert file.is_file()


def refuses(file: Path, of: str) -> None:
    raise Unsupported(f"'{file.name}' is {of}")


def fails(file: Path) -> None:
    raise ZeroDivisionError


def crashes(file: Path) -> None:
    signal.raise_signal(signal.SIGSEGV)


def exits(file: Path) -> None:
    os._exit(7)


def computes(file: Path) -> None:
    while True:
        pass


def killed(file: Path) -> None:
    signal.raise_signal(signal.SIGKILL)


def lacks_room(file: Path) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


def waits_for_a_server(file: Path) -> None:
    raise Unavailable("the server is not up")


def hoards(file: Path) -> None:
    held = [bytes(1 << 20)]
    while True:
        held.append(bytes(1 << 20))


def waits(file: Path, told: str) -> None:
    with open(told, "w") as pipe:
        pipe.write(str(os.getpid()))
    signal.pause()
