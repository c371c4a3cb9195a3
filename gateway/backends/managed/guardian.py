"""A process between the gateway and a server that it starts; the server outlives neither.

    python -I -S guardian.py <grace seconds> <shared memory prefix> <folder> <command> ...

It runs the command and waits. When the command ends, it kills the command's remaining processes and
ends in the same way (status or signal). SIGTERM asks the whole process group to end, and kills the
rest after the grace period; SIGINT kills at once. The end of stdin means that the gateway has gone,
whatever the cause: it has the effect of SIGTERM, and the server's folder is removed. Shared memory
with the prefix is always removed.

It is a separate program: it uses only the standard library, and starts fast. Linux only, for
``PR_SET_CHILD_SUBREAPER``: orphaned processes below it become its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY = Path("/dev/shm")
#: The shell's status for a command that cannot be run.
CANNOT_RUN = 127


class Guardian:
    """Runs a command and ends its process tree."""

    def __init__(self, grace_seconds: float, command: list[str]) -> None:
        self._grace_seconds = grace_seconds
        self._prctl = ctypes.CDLL(None).prctl
        self._prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._signals, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        #: The gateway has gone.
        self.orphaned = False
        self._kill_at: float | None = None
        self._status: int | None = None
        self._asked_the_rest = False
        self._child = self._start(command)

    def _start(self, command: list[str]) -> int:
        guardian = os.getpid()
        child = os.fork()
        if child:
            return child
        try:
            self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guardian:
                os._exit(CANNOT_RUN)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exec would inherit Python's SIG_IGN
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]} cannot be run: {error.strerror}", file=sys.stderr, flush=True)
        finally:
            os._exit(CANNOT_RUN)

    def wait(self) -> int:
        """Wait until every process of the command has ended; return the command's wait status."""
        while self._reap():
            if self._status is not None and self._kill_at is None:
                break  # it ended by itself: kill the processes it has left
            if self._status is not None and not self._asked_the_rest:
                self._asked_the_rest = True
                _send(signal.SIGTERM)  # orphans with a process group of their own
            left = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            if left == 0.0:
                break
            watched = [self._signals] if self.orphaned else [self._signals, 0]
            readable, _, _ = select.select(watched, [], [], left)
            if 0 in readable and not os.read(0, 4096):
                self.orphaned = True
                self._ask_to_end()
            received = os.read(self._signals, 4096) if self._signals in readable else b""
            if signal.SIGINT in received:
                break
            if signal.SIGTERM in received:
                self._ask_to_end()
        self._kill_all()
        return self._status or 0

    def _ask_to_end(self) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace_seconds
            os.killpg(0, signal.SIGTERM)  # including this process, which ignores it now

    def _reap(self) -> bool:
        """Reap ended children; whether any are left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return True
                self._note(pid, status)
        except ChildProcessError:
            return False

    def _kill_all(self) -> None:
        # Children of a killed process become children of this one.
        with contextlib.suppress(ChildProcessError):
            while True:
                _send(signal.SIGKILL)
                self._note(*os.waitpid(-1, 0))

    def _note(self, pid: int, status: int) -> None:
        if pid == self._child:
            self._status = status


def _send(number: signal.Signals) -> None:
    for pid in _children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _children() -> Iterator[int]:
    me = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                stat = Path("/proc", name, "stat").read_bytes()
                # The fields after the command's name, which may contain anything: state, parent.
                if int(stat.rpartition(b")")[2].split()[1]) == me:
                    yield int(name)


def _end_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump of this process
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def main() -> NoReturn:
    grace, prefix, folder, *command = sys.argv[1:]
    guardian = Guardian(float(grace), command)
    status = guardian.wait()
    if prefix:
        for region in SHARED_MEMORY.glob(f"{prefix}*"):
            region.unlink(missing_ok=True)
    if guardian.orphaned:
        shutil.rmtree(folder, ignore_errors=True)
    _end_as(status)


if __name__ == "__main__":
    main()
