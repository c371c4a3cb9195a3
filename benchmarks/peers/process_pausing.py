"""Pausing of processes, so that unmeasured servers use no CPU time."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PausedProcess:
    """A process and its start time, as its number may be reused."""

    number: int
    began: int  # clock ticks since the machine's start


@dataclass(frozen=True)
class _Status:
    process: PausedProcess
    parent: int
    session: int


def _status(number: int) -> _Status | None:
    """The status of a process; None if it is gone."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return None
    # "pid (name) state ppid pgrp session ...": the name may hold anything, the last ")" ends it
    fields = text.rpartition(")")[2].split()
    return _Status(PausedProcess(number, int(fields[19])), int(fields[1]), int(fields[3]))


def family(leader: int) -> list[PausedProcess]:
    """The process, its descendants, and the members of its session."""
    numbers = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    everyone = {number: status for number in numbers if (status := _status(number))}
    found = {n for n, status in everyone.items() if leader in (n, status.session)}
    while below := {n for n, s in everyone.items() if s.parent in found} - found:
        found |= below
    return [everyone[number].process for number in found]


def send(processes: Iterable[PausedProcess], signal_number: int) -> None:
    """Send a signal to those that still exist."""
    for process in processes:
        status = _status(process.number)
        if status is not None and status.process == process:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.number, signal_number)


def pause(leader: int) -> None:
    send(family(leader), signal.SIGSTOP)


def resume(leader: int) -> None:
    send(family(leader), signal.SIGCONT)
