"""A worker process, as its parent starts and restarts it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import modelport
from modelport.gateway.runtime.child_process import ChildProcess

#: Environment variable with a worker's assignment, as JSON.
VARIABLE = "MODELPORT_WORKER"
#: Bounds of the exponential backoff before a worker is started again.
FIRST_WAIT_SECONDS = 0.1
LAST_WAIT_SECONDS = 10.0
#: A worker that ran for this long resets the backoff.
STEADY_SECONDS = 60.0

#: Not ``-m``: the package may lie outside of ``sys.path``.
_MAIN = """
import importlib, sys
sys.path.append(sys.argv.pop(1))
from modelport.gateway.runtime import collector
with collector.paused():
    entry_point = importlib.import_module(sys.argv.pop(1))
entry_point.main()
"""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Instructions for a worker, passed in its environment.

    Attributes:
        arguments: The command line of ``modelport serve``.
        channel: Descriptor of the socket to the parent.
        heartbeats: Descriptor of the datagram socket for the event loop's heartbeats.
        http_socket: Descriptor of the UNIX domain socket for HTTP on which the parent listens; -1
            for none.
        grpc_socket: The same for gRPC.
        ledger: Descriptor of the ledger of quotas; -1 for none.
        spare: The worker waits on ``channel`` until it replaces another, whose number it gets.
        backends: The backends that a spare imports before it waits.
        restarted: The other workers serve already, so it restores their state before it listens.
    """

    number: int
    http_port: int
    grpc_port: int
    arguments: tuple[str, ...]
    restarted: bool = False
    channel: int = -1
    heartbeats: int = -1
    http_socket: int = -1
    grpc_socket: int = -1
    ledger: int = -1
    spare: bool = False
    backends: tuple[str, ...] = ()


class WorkerProcess:
    """A worker process as the parent sees it; ``entry_point`` is a module with ``main``."""

    def __init__(self, assignment: Assignment, entry_point: str) -> None:
        self._assignment = assignment
        self._entry_point = entry_point
        #: The parent's ends of the two sockets, until the supervisor takes them.
        self.channel: socket.socket | None = None
        self.heartbeats: socket.socket | None = None
        self._process: ChildProcess | None = None
        self._spawned_at = 0.0
        #: Consecutive ends, each soon after the start.
        self.failures = 0
        self.number = assignment.number

    @property
    def pid(self) -> int | None:
        """Process id, or None if it is not running."""
        return None if self._process is None else self._process.pid

    def spawn(
        self, restarted: bool = False, spare: bool = False, backends: Iterable[str] = ()
    ) -> None:
        """Start the process; a spare imports ``backends``.

        Raises:
            OSError: It cannot be started.
        """
        self.channel, channel = socket.socketpair()
        self.heartbeats, heartbeats = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.heartbeats.setblocking(False)
        assignment = replace(
            self._assignment,
            restarted=restarted or spare,
            channel=channel.fileno(),
            heartbeats=heartbeats.fileno(),
            spare=spare,
            backends=tuple(backends),
        )
        shared = (assignment.http_socket, assignment.grpc_socket, assignment.ledger)
        fields = {name: getattr(assignment, name) for name in Assignment.__slots__}
        self._spawned_at = time.monotonic()
        root = str(Path(modelport.__file__).parents[1])
        with channel, heartbeats:
            self._process = ChildProcess(
                [sys.executable, "-P", "-c", _MAIN, root, self._entry_point],
                env={**os.environ, VARIABLE: json.dumps(fields)},
                pass_fds=(channel.fileno(), heartbeats.fileno(), *(n for n in shared if n >= 0)),
            )

    def spare(self, number: int) -> WorkerProcess:
        """Make a spare, which ``adopt`` turns into a worker. It must be spawned as a spare."""
        return WorkerProcess(replace(self._assignment, number=number), self._entry_point)

    def adopt(self, spare: WorkerProcess) -> None:
        """Replace this worker's process with that of ``spare``, which waits on its channel."""
        self._process, spare._process = spare._process, None
        self.channel, self.heartbeats = spare.channel, spare.heartbeats
        spare.channel = spare.heartbeats = None
        self._spawned_at = time.monotonic()

    def ended(self) -> str:
        """Reap the process; return its exit status or signal, or an empty string if it runs."""
        status = None if self._process is None else self._process.poll()
        if status is None:
            return ""
        self._process = None
        lived = time.monotonic() - self._spawned_at
        self.failures = 1 if lived > STEADY_SECONDS else self.failures + 1
        return f"status {status}" if status >= 0 else signal.Signals(-status).name

    @property
    def wait_seconds(self) -> float:
        """Backoff before the next start."""
        return min(FIRST_WAIT_SECONDS * 2.0 ** (self.failures - 1), LAST_WAIT_SECONDS)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
