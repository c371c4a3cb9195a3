"""One measured server process with one model: started, timed, inspected, stopped."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from typing import Protocol as Structural

from modelport.gateway.runtime.child_process import ChildProcess
from modelport.loadtests.load.payloads import Payloads
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.serving.answer_check import AnswerCheck
from modelport.loadtests.system import process_tree, processes
from modelport.loadtests.system.processes import ServerFailed, tail
from modelport.loadtests.users.client import Unanswered

READY_SECONDS = 120.0
#: Polling interval, far below the start-up time of any server.
POLL_SECONDS = 0.005
PROBE_SECONDS = 2.0
#: Wrong answers after which only wrong ones are expected.
MOST_WRONG = 3


class AnswersWrongly(ServerFailed):
    """The server started, but its answers are wrong."""


@dataclass(frozen=True)
class MeasuredServerLaunch:
    """The start of a server: its command, its targets, its readiness check.

    Attributes:
        targets: the model in every protocol that the server speaks.
        ready: one check; an ``OSError`` counts as not ready.
    """

    command: tuple[str, ...]
    targets: Mapping[LoadTestProtocol, LoadTestTarget]
    ready: Callable[[], bool]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None


class ServedBackend(Structural):
    """A kind of server with a model."""

    def launch(self, work: Path) -> MeasuredServerLaunch:
        """Prepare a start on free ports, with files under the empty folder ``work``.

        Raises:
            modelport.loadtests.system.environments.Missing: this machine lacks the server.
        """
        ...


@dataclass
class ReadyServer:
    """A server that is READY."""

    process: ChildProcess
    targets: Mapping[LoadTestProtocol, LoadTestTarget]
    log: Path
    #: ``time.perf_counter()`` when it was started.
    started: float
    #: Process start to READY.
    cold_start_seconds: float

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def first_response(self, payloads: Payloads, *, within_seconds: float = READY_SECONDS) -> float:
        """Seconds from the process' start to the first correct answer, to the first request.

        The Open Inference Protocol is used if the server speaks it, otherwise its own protocol.

        Raises:
            AnswersWrongly: its answers are wrong.
            ServerFailed: it ended, or did not respond in time; the message has the last problem.
        """
        said, wrong = "no answer", 0
        with AnswerCheck(self.http_target, payloads) as examination:
            while time.perf_counter() - self.started < within_seconds:
                if not self.alive:
                    raise ServerFailed(f"exited with {self.process.returncode}\n{tail(self.log)}")
                try:
                    problem = examination.wrong(0)
                except Unanswered as error:
                    said = str(error)
                else:
                    if problem is None:
                        return time.perf_counter() - self.started
                    wrong += 1
                    if wrong == MOST_WRONG:
                        raise AnswersWrongly(problem)
                time.sleep(POLL_SECONDS)
        raise ServerFailed(f"no response in {within_seconds:.0f} s: {said}")

    @property
    def http_target(self) -> LoadTestTarget:
        """The target for checks before any load."""
        for protocol in (
            LoadTestProtocol.OIP_HTTP,
            LoadTestProtocol.TORCHSERVE_HTTP,
            LoadTestProtocol.TFSERVING_HTTP,
        ):
            if protocol in self.targets:
                return self.targets[protocol]
        raise KeyError("no target over HTTP")

    def memory_bytes(self) -> int:
        """Memory of all its processes, see ``process_tree``."""
        return process_tree.memory_bytes(self.process.pid)

    def cpu_seconds(self) -> float:
        """CPU time of all its processes since the start."""
        return process_tree.cpu_seconds(self.process.pid)


@contextlib.contextmanager
def served(
    backend: ServedBackend,
    work: Path,
    *,
    cores: Sequence[int] = (),
    ready_seconds: float = READY_SECONDS,
) -> Iterator[ReadyServer]:
    """Run the backend's server: READY inside the block, gone after it.

    Args:
        work: an empty or missing folder for this start alone.
        cores: the server's cores; none: all.

    Raises:
        ServerFailed: it ended, or was not ready in time; with the log's tail.
        modelport.loadtests.system.environments.Missing: this machine lacks the server.
    """
    work.mkdir(parents=True, exist_ok=True)
    launch = backend.launch(work)
    log = work / "server.log"
    started = time.perf_counter()
    with processes.running(
        launch.command,
        log=log,
        ready=launch.ready,
        cores=cores,
        env={**_threads(cores), **launch.env},
        cwd=launch.cwd,
        ready_seconds=ready_seconds,
        must_stop=False,
    ) as process:
        yield ReadyServer(process, launch.targets, log, started, time.perf_counter() - started)


def _threads(cores: Sequence[int]) -> dict[str, str]:
    """One thread per core in every runtime, as more threads would slow a server down."""
    if not cores:
        return {}
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
    return dict.fromkeys(names, str(len(cores)))


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
    """The document at ``path``; None if the status is not 200."""
    status, body = get(address, path)
    return json.loads(body) if status == 200 else None
