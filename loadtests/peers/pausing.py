"""Stopped processes: while one server is measured, the others have no share of its core."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process and when it began: its number may be another's later."""

    number: int
    began: int  # clock ticks since the machine's start


@dataclass(frozen=True)
class _Status:
    process: Process
    parent: int
    session: int


def _status(number: int) -> _Status | None:
    """None when it is gone."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return None
    # "pid (name) state ppid pgrp session ...": the name may hold anything, the last ")" ends it
    fields = text.rpartition(")")[2].split()
    return _Status(Process(number, int(fields[19])), int(fields[1]), int(fields[3]))


def family(leader: int) -> list[Process]:
    """The process, all below it, and all of the session that it leads."""
    numbers = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    everyone = {number: status for number in numbers if (status := _status(number))}
    found = {n for n, status in everyone.items() if leader in (n, status.session)}
    while below := {n for n, s in everyone.items() if s.parent in found} - found:
        found |= below
    return [everyone[number].process for number in found]


def send(processes: Iterable[Process], signal_number: int) -> None:
    """Send a signal to those that are still there."""
    for process in processes:
        status = _status(process.number)
        if status is not None and status.process == process:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.number, signal_number)


def pause(leader: int) -> None:
    send(family(leader), signal.SIGSTOP)


def resume(leader: int) -> None:
    send(family(leader), signal.SIGCONT)
