"""Servers side by side for one model: started, checked, and all but one paused."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import clients, process_pausing
from benchmarks.peers.clients import PeerClient
from benchmarks.peers.models import Files
from benchmarks.peers.servers.base import PeerLaunch, PeerServer
from benchmarks.script import only
from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import HOST, ServerFailed, free_ports, running

#: Failures of a server that do not end the benchmark.
TROUBLE = (environments.Missing, ServerFailed, clients.WrongAnswer)
PORTS = 6
ANSWER_SECONDS = 30.0  # some servers are ready before their model is
POLL_SECONDS = 0.2


@dataclass
class RunningServer:
    """A running server: its process, paused unless awake, and a client for each protocol."""

    process: int
    stoppable: bool
    clients: Mapping[str, PeerClient]

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Resume the server inside the block, once it has answered."""
        if self.stoppable:
            process_pausing.resume(self.process)
        try:
            next(iter(self.clients.values())).check()
            yield
        finally:
            self.rest()

    def rest(self) -> None:
        if self.stoppable:
            process_pausing.pause(self.process)


@contextlib.contextmanager
def started(
    server: PeerServer, files: Files, protocols: Iterable[str], core: int, client_core: int
) -> Iterator[RunningServer]:
    """Start a server on ``core``, check one answer per protocol, and pause it.

    Raises:
        one of ``TROUBLE``: it cannot be installed, does not start, or answers wrongly.
    """
    name = files.model.name
    work = environments.folder(f"work/{server.name}")
    shutil.rmtree(work)
    work.mkdir()
    http, grpc, metrics, *more = free_ports(PORTS)
    repository = files.batching if server.batching else files.repository
    launch = PeerLaunch(repository, work, http, grpc, metrics, name, tuple(more))
    command = server.command(launch)
    family: list[process_pausing.PausedProcess] = []
    try:
        with running(
            command.arguments,
            log=environments.folder("logs") / f"{server.name}-{name}.log",
            ready=f"http://{HOST}:{http}{server.ready_path.format(model=name)}",
            cores=() if server.apart else only(core),
            env={"OMP_NUM_THREADS": "1", **command.env},
            cwd=command.cwd,
            must_stop=False,
        ) as process:
            try:
                found = _clients(server, files, protocols, launch)
                for client in found.values():
                    _answers(client)
                if server.apart:
                    _part(process.pid, core, client_core)
                entrant = RunningServer(process.pid, server.stoppable, found)
                entrant.rest()
                yield entrant
            finally:
                family = process_pausing.family(process.pid)
                process_pausing.send(family, signal.SIGCONT)
    finally:
        process_pausing.send(
            family, signal.SIGKILL
        )  # processes that left the server's group and outlived it
        for folder in command.leftovers:
            shutil.rmtree(folder, ignore_errors=True)


def _part(process: int, core: int, client_core: int) -> None:
    """Pin the first thread, with the event loop, to one core and the model's threads to another.

    The server was started on all cores: on a single one it might have no such threads.
    """
    for task in Path(f"/proc/{process}/task").iterdir():
        loop = int(task.name) == process
        os.sched_setaffinity(int(task.name), {client_core if loop else core})


def _clients(
    server: PeerServer, files: Files, protocols: Iterable[str], launch: PeerLaunch
) -> dict[str, PeerClient]:
    found: dict[str, PeerClient] = {}
    for protocol in protocols:
        if protocol in server.encodings:
            exchange = server.encodings[protocol](files.model)
            found[protocol] = clients.http(exchange, files, launch.http, launch.work)
        else:
            client = {"grpc": clients.grpc, "perf_analyzer": clients.perf_analyzer}[protocol]
            found[protocol] = client(files, launch.grpc, launch.work)
    return found


def _answers(client: PeerClient) -> None:
    """Return once the server answers rightly."""
    give_up = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            client.check()
        except ServerFailed:
            if time.monotonic() > give_up:
                raise
            time.sleep(POLL_SECONDS)
        else:
            return
