"""Child processes: started, stopped with all that they started, and never outliving this process.

A child leads a session of its own, so the terminal's Ctrl-C reaches only this process, which
decides. Its input is empty unless ``stdin`` says otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
#: Signals that ask this process to end.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Interruption:
    """State of Ctrl-C: ``held`` back, and ``waiting`` to be raised."""

    held = waiting = False


def interrupt(number: int, frame: object) -> None:
    """Handle a signal by an exception, so that every ``finally`` runs."""
    if Interruption.held:
        Interruption.waiting = True
    else:
        raise KeyboardInterrupt


class ChildProcess(subprocess.Popen[Any]):
    """A child process.

    Args:
        log: the file for both of its outputs, truncated first.
        cores: the only cores it may use; none: all.
        parent_death: the signal that Linux sends it when the thread that starts it ends, even by
            ``kill -9``. None if its program notices that by itself: then no code of Python runs
            between fork and exec, which may deadlock in a process with many threads.
        options: those of ``subprocess.Popen``.

    Raises:
        OSError: the program cannot be run.
        KeyboardInterrupt: ``interrupt`` was called meanwhile; the child is gone. Python runs
            callbacks when it forks, and swallows what a handler raises inside one.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None = None,
        cores: Sequence[int] = (),
        parent_death: signal.Signals | None = signal.SIGKILL,
        **options: Any,
    ) -> None:
        options.setdefault("stdin", subprocess.DEVNULL)
        with contextlib.ExitStack() as stack:
            if parent_death is not None:
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
                stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
                options["preexec_fn"] = _setup(parent_death, cores, mask)
            if log is not None:
                out = stack.enter_context(log.open("wb"))
                options |= {"stdout": out, "stderr": subprocess.STDOUT}
            Interruption.held = True
            try:
                super().__init__(list(command), start_new_session=True, **options)
            finally:
                Interruption.held = False
                waiting, Interruption.waiting = Interruption.waiting, False
        if waiting:
            self.kill()
            self.wait()
            raise KeyboardInterrupt

    def stop(self, grace_seconds: float) -> bool:
        """Ask the child to end, and kill it and its group afterwards.

        Returns:
            Whether the child had to be killed: it was not gone after ``grace_seconds``.
        """
        killed = False
        try:
            if self.poll() is None:
                self.terminate()
                self.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            killed = True
        finally:
            self.kill()
            self.wait()
        return killed

    def kill(self) -> None:
        """Kill the child and its group, which may live on after its own end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _setup(
    parent_death: signal.Signals, cores: Sequence[int], mask: set[int]
) -> Callable[[], None]:
    """Code for the child before its program begins; ``mask``: the signals to block again."""
    parent = os.getpid()

    def setup() -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        for number in _ENDING:
            # Until now the child was in the parent's session. A Ctrl-C that has come is dropped:
            # the child's copy of asyncio's handler would tell the parent of a second.
            before = signal.signal(number, signal.SIG_IGN)
            if before is not signal.SIG_IGN or number is signal.SIGINT:  # a shell may ignore it
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, parent_death, 0, 0, 0)
            if os.getppid() != parent:  # it ended before the signal was set
                os._exit(1)

    return setup
