"""One server process with one model: started, timed, looked at, stopped."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from typing import Protocol as Structural

from modelport.loadtests import processes
from modelport.loadtests.payloads import Payloads
from modelport.loadtests.processes import ServerFailed, tail
from modelport.loadtests.serving import process_tree
from modelport.loadtests.serving.answer_check import Examination
from modelport.loadtests.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.users.client import Unanswered

READY_SECONDS = 120.0
#: Between two looks: far below what any server takes to start.
POLL_SECONDS = 0.005
PROBE_SECONDS = 2.0
#: Wrong answers after which nothing but wrong ones is expected.
MOST_WRONG = 3


class AnswersWrongly(ServerFailed):
    """The server started, and what it answers is not right."""


@dataclass(frozen=True)
class ServerLaunch:
    """How one server is started, where it then answers, and how it is known to be ready.

    Attributes:
        targets: the model in every dialect that the server speaks.
        ready: one look; an ``OSError`` is a no.
    """

    command: tuple[str, ...]
    targets: Mapping[LoadTestProtocol, LoadTestTarget]
    ready: Callable[[], bool]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None


class ServedBackend(Structural):
    """What can be served: a kind of server with a model of its own."""

    def launch(self, work: Path) -> ServerLaunch:
        """A start on ports that are free now, with files of its own under ``work``, which is empty.

        Raises:
            modelport.loadtests.environments.Missing: this machine has no such server.
        """
        ...


@dataclass
class Served:
    """A server that is READY."""

    process: subprocess.Popen[bytes]
    targets: Mapping[LoadTestProtocol, LoadTestTarget]
    log: Path
    #: ``time.perf_counter()`` when it was started.
    started: float
    #: Process start to READY.
    cold_start_seconds: float

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def first_response(
        self, payloads: Payloads, *, within_seconds: float = READY_SECONDS, number: int = 0
    ) -> float:
        """Seconds from the process' start to the first correct answer, to request ``number``.

        The Open Inference Protocol is asked where the server speaks it, else its own dialect.

        Raises:
            AnswersWrongly: it answers, and not rightly.
            ServerFailed: it ended, or did not answer in time; the last problem is named.
        """
        said, wrong = "no answer", 0
        with Examination(self.http_target, payloads) as examination:
            while time.perf_counter() - self.started < within_seconds:
                if not self.alive:
                    raise ServerFailed(f"ended with {self.process.returncode}\n{tail(self.log)}")
                try:
                    problem = examination.wrong(number)
                except Unanswered as error:
                    said = str(error)
                else:
                    if problem is None:
                        return time.perf_counter() - self.started
                    wrong += 1
                    if wrong == MOST_WRONG:
                        raise AnswersWrongly(problem)
                time.sleep(POLL_SECONDS)
        raise ServerFailed(f"no answer in {within_seconds:.0f} s: {said}")

    @property
    def http_target(self) -> LoadTestTarget:
        """What is asked before any load."""
        for protocol in (
            LoadTestProtocol.OIP_HTTP,
            LoadTestProtocol.TORCHSERVE_HTTP,
            LoadTestProtocol.TFSERVING_HTTP,
        ):
            if protocol in self.targets:
                return self.targets[protocol]
        raise KeyError("no target over HTTP")

    def memory_bytes(self) -> int:
        """Of all its processes, see ``tree``."""
        return process_tree.memory_bytes(self.process.pid)

    def cpu_seconds(self) -> float:
        """Of all its processes, since the start."""
        return process_tree.cpu_seconds(self.process.pid)

    def stop(self) -> None:
        """End it; one that does not end when told is killed. Safe to repeat."""
        descendants = list(process_tree.processes(self.process.pid))[1:]
        processes.stop(self.process)
        for left in descendants:  # those that made sessions of their own
            with contextlib.suppress(Exception):
                left.kill()


@contextlib.contextmanager
def served(
    backend: ServedBackend,
    work: Path,
    *,
    cores: Sequence[int] = (),
    ready_seconds: float = READY_SECONDS,
) -> Iterator[Served]:
    """The backend's server, READY inside the block and gone after it, whatever happens.

    Args:
        work: an empty folder, or one that does not exist yet: of this start alone.
        cores: those that it may run on; none: all.

    Raises:
        ServerFailed: it ended, or was not ready in time; with the log's tail.
        modelport.loadtests.environments.Missing: this machine has no such server.
    """
    work.mkdir(parents=True, exist_ok=True)
    launch = backend.launch(work)
    log = work / "server.log"
    started = time.perf_counter()
    with log.open("wb") as out:
        process = processes.start(
            launch.command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_threads(cores), **launch.env},
            cwd=launch.cwd,
            start_new_session=True,
            preexec_fn=lambda: _prepare(cores),
        )
    server = Served(process, launch.targets, log, started, 0.0)
    try:
        with processes.guarded(process):
            server.cold_start_seconds = _wait(server, launch, ready_seconds)
            yield server
    finally:
        server.stop()


def _wait(server: Served, launch: ServerLaunch, ready_seconds: float) -> float:
    while (seconds := time.perf_counter() - server.started) < ready_seconds:
        if not server.alive:
            code = server.process.returncode
            raise ServerFailed(f"ended with {code} before it was ready\n{tail(server.log)}")
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            if launch.ready():
                return time.perf_counter() - server.started
        time.sleep(POLL_SECONDS)
    raise ServerFailed(f"not ready after {seconds:.0f} s\n{tail(server.log)}")


def _threads(cores: Sequence[int]) -> dict[str, str]:
    """As many threads in every runtime as it has cores: no server may be slow for too many."""
    if not cores:
        return {}
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
    return dict.fromkeys(names, str(len(cores)))


def _prepare(cores: Sequence[int]) -> None:
    """In the child: its cores, Ctrl-C as a fresh process has it, its end with its parent's."""
    if cores:
        os.sched_setaffinity(0, cores)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    processes.die_with_parent()


def get(address: str, path: str) -> tuple[int, bytes]:
    """Status and body of one ``GET``; raises ``OSError`` or ``http.client.HTTPException``."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=PROBE_SECONDS)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def get_json(address: str, path: str) -> Any:
    """The document at ``path``; None where the status is not 200."""
    status, body = get(address, path)
    return json.loads(body) if status == 200 else None
