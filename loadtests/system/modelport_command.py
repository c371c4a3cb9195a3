"""``modelport`` as a child process: its output and its errors."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

from modelport.gateway.runtime.child_process import ChildProcess
from modelport.loadtests.system.processes import STOP_SECONDS

#: The command of this Python's environment.
MODELPORT = (sys.executable, "-m", "modelport")
_PREFIX = "modelport: error: "
#: Exit codes of ``modelport``: invalid argument, damaged checkpoint, interrupted.
USAGE, INTEGRITY, INTERRUPTED = 2, 5, 130
#: Status of a command that took too long, as in timeout(1).
TIMED_OUT = 124


class Failed(Exception):
    """The command failed; the message is its own, in one line."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def modelport(arguments: Sequence[str], within_seconds: float | None = None) -> str:
    """Run ``modelport ARGUMENTS`` and return its standard output; an exception here ends it too.

    Raises:
        Failed: its exit status was not 0, or it took longer than ``within_seconds``.
    """
    with ChildProcess(
        [*MODELPORT, *arguments],
        parent_death=signal.SIGTERM,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            out, err = process.communicate(timeout=within_seconds)
        except subprocess.TimeoutExpired as error:
            told = f"{arguments[0]} took longer than {within_seconds:g} s"
            raise Failed(told, TIMED_OUT) from error
        finally:
            process.stop(STOP_SECONDS)
    if process.returncode == 0:
        return str(out)
    lines = [line for line in err.splitlines() if line.strip()] or ["no message"]
    told = next((line for line in lines if line.startswith(_PREFIX)), lines[-1])
    raise Failed(told.removeprefix(_PREFIX), process.returncode)
