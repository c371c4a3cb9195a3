"""One worker's process: started, watched, started again when it has ended."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import modelport

#: What a worker has to know, as JSON.
VARIABLE = "MODELPORT_WORKER"
#: A spare is told the number of its worker in so many bytes.
NUMBER_BYTES = 4
PR_SET_PDEATHSIG = 1
#: Wait so long before a worker is started again, and then twice as long, ...
FIRST_WAIT_SECONDS = 0.1
LAST_WAIT_SECONDS = 10.0
#: One that has lived for so long did not end because of how it was started.
STEADY_SECONDS = 60.0

#: Not ``-m``, which would look for the package in the current folder first.
_MAIN = """
import sys
sys.path.append(sys.argv.pop(1))
from modelport.gateway.runtime.startup import hasten
hasten()
from modelport.gateway.server.workers.worker import main
main()
"""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker is told.

    Attributes:
        arguments: of ``modelport serve``.
        hub: the descriptor of a socket whose other end the parent has.
        beats: the descriptor of a socket of datagrams: how the worker's event loop does.
        spare: it takes the place of whichever worker ends first; the hub says of which.
        restarted: the others serve already: it listens when it has what they have.
    """

    number: int
    http_port: int
    grpc_port: int
    arguments: tuple[str, ...]
    restarted: bool = False
    hub: int = -1
    beats: int = -1
    spare: bool = False


class WorkerProcess:
    """``spawn`` starts it; the parent reaps it."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        #: The parent's end of the hub, until it is taken.
        self.hub: socket.socket | None = None
        self.beats: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._spawned_at = 0.0
        #: Ends in a row, each soon after the start.
        self.failures = 0
        self.number = assignment.number

    @property
    def pid(self) -> int | None:
        """While it runs."""
        return None if self._process is None else self._process.pid

    def spawn(self, restarted: bool = False, spare: bool = False) -> None:
        """Start it.

        Raises:
            OSError: it cannot be started.
        """
        self.hub, hub = socket.socketpair()
        self.beats, beats = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.beats.setblocking(False)
        assignment = replace(
            self._assignment,
            restarted=restarted or spare,
            hub=hub.fileno(),
            beats=beats.fileno(),
            spare=spare,
        )
        told = {name: getattr(assignment, name) for name in Assignment.__slots__}
        self._spawned_at = time.monotonic()
        root = str(Path(modelport.__file__).parents[1])
        with hub, beats:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, root],
                env={**os.environ, VARIABLE: json.dumps(told)},
                stdin=subprocess.DEVNULL,
                pass_fds=(hub.fileno(), beats.fileno()),
                # A group of its own: the terminal's Ctrl-C is the parent's.
                process_group=0,
                preexec_fn=_end_with(os.getpid()),
            )

    def spare(self, number: int) -> WorkerProcess:
        """Another process, to take a worker's place: ``spawn`` it as a spare."""
        return WorkerProcess(replace(self._assignment, number=number))

    def adopt(self, spare: WorkerProcess) -> None:
        """Have the process of ``spare``, which has been spawned as one, take this one's place.

        Raises:
            OSError: it has ended.
        """
        assert spare.hub is not None
        spare.hub.sendall(self.number.to_bytes(NUMBER_BYTES, "big"))
        if spare.pid is not None and hasattr(os, "SCHED_OTHER"):
            with contextlib.suppress(OSError):
                os.sched_setscheduler(spare.pid, os.SCHED_OTHER, os.sched_param(0))
        self._process, spare._process = spare._process, None
        self.hub, self.beats, spare.hub, spare.beats = spare.hub, spare.beats, None, None
        self._spawned_at = time.monotonic()

    def ended(self) -> str:
        """How it has ended, if it has."""
        status = None if self._process is None else self._process.poll()
        if status is None:
            return ""
        self._process = None
        lived = time.monotonic() - self._spawned_at
        self.failures = 1 if lived > STEADY_SECONDS else self.failures + 1
        return f"status {status}" if status >= 0 else signal.Signals(-status).name

    @property
    def wait_seconds(self) -> float:
        """How long to wait before it is started again."""
        return min(FIRST_WAIT_SECONDS * 2.0 ** (self.failures - 1), LAST_WAIT_SECONDS)

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _end_with(parent: int) -> Callable[[], None] | None:
    """Runs in the child: whatever ends the parent ends it too, also where it hangs. Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def end_with_parent() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return end_with_parent
