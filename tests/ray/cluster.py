"""A real Ray cluster of several nodes on this machine, each a tree of processes of its own.

The head runs no replicas (``--num-cpus 0``), as Ray's production guide asks for. The Serve proxies
of every worker node have ports of their own, so that each is an endpoint, as nodes are elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import HOST, free_ports
from tests.gateway.repository.storage import moto_server

ROOT = environments.ROOT
SOURCE = ROOT / "deploy" / "ray"
INSIDE = Path(__file__).parent / "inside"
OBJECT_STORE_BYTES = 80 * 1024 * 1024  # the least that Ray takes, and a little more
#: Logical: as many Python workers are started ahead of time.
WORKER_CPUS = 2
START_SECONDS = 120.0
STOP_SECONDS = 20.0
#: As README.md says of the head: by default a dead node is known after 15 s.
HEALTH = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
REPLICA = "ServeReplica:modelport:"


def programs() -> Path:
    """The bin folder of an environment with Ray Serve and what modelport needs to serve."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return environments.venv(
        "ray-modelport", *extras["ray"], *extras["s3"], *project["dependencies"]
    )


def environment() -> dict[str, str]:
    """For every process of the cluster: this source, and nothing that phones home."""
    return {
        **os.environ,
        **moto_server.ENVIRONMENT,
        **HEALTH,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_AUTH_MODE": "disabled",  # it would write a token into the home folder
        "RAY_raylet_start_wait_time_s": "100",  # all of it starts on few cores
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }


@dataclass(slots=True)
class RayNode:
    """``ray start --block``, and everything under it."""

    process: subprocess.Popen[bytes]
    http_port: int
    grpc_port: int
    log: Path

    @property
    def endpoint(self) -> str:
        return f"{HOST}:{self.grpc_port}"

    def members(self) -> list[psutil.Process]:
        """Raylet, proxy, replicas and the rest."""
        with contextlib.suppress(psutil.NoSuchProcess):
            me = psutil.Process(self.process.pid)
            return [me, *me.children(recursive=True)]
        return []

    def replicas(self, model: str) -> list[psutil.Process]:
        found = []
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                if f"{REPLICA}{model}" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def kill(self) -> int:
        """SIGKILL everything at once, as when the machine goes; how many processes it were."""
        members = self.members()
        for process in members:  # none may notice, and tidy up, before it is its turn
            with contextlib.suppress(psutil.Error):
                process.suspend()
        for process in members:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        psutil.wait_procs(members, timeout=STOP_SECONDS)
        return len(members)


class Cluster:
    """``bin_folder`` is the environment's. ``folder`` is short: Ray's sockets lie in it."""

    def __init__(self, bin_folder: Path, folder: Path) -> None:
        self.bin_folder = bin_folder
        self._folder = folder
        self.port, self._client_port = free_ports(2)
        self.nodes: list[RayNode] = []
        self._watcher: ServeStatusWatcher | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def start_head(self) -> None:
        self._start("head", 0, 0, [
            "--head", f"--port={self.port}", "--num-cpus=0", "--include-dashboard=false",
            f"--temp-dir={self._folder}", f"--ray-client-server-port={self._client_port}",
        ])  # fmt: skip

    def add_worker(self) -> RayNode:
        return self._worker(*free_ports(2))

    def restart(self, node: RayNode) -> RayNode:
        """A new node at the address of one that was killed."""
        return self._worker(node.http_port, node.grpc_port)

    def _worker(self, http_port: int, grpc_port: int) -> RayNode:
        flags = [f"--address={self.address}", f"--num-cpus={WORKER_CPUS}"]
        return self._start(f"worker-{len(self.nodes)}", http_port, grpc_port, flags)

    def _start(self, name: str, http_port: int, grpc_port: int, flags: Sequence[str]) -> RayNode:
        log = self._folder.parent / f"{name}.log"
        own = {
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(http_port),
            "RAY_SERVE_WORKER_PROXY_GRPC_PORT": str(grpc_port),
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    str(self.bin_folder / "ray"), "start", "--block", f"--node-ip-address={HOST}",
                    "--disable-usage-stats", f"--object-store-memory={OBJECT_STORE_BYTES}",
                    *flags,
                ],
                env={**environment(), **(own if http_port else {})},
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        node = RayNode(process, http_port, grpc_port, log)
        self.nodes.append(node)
        give_up = time.monotonic() + START_SECONDS
        while b"Ray runtime started" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > give_up:
                raise environments.Missing(f"ray start failed:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        return node

    def deploy(self, config: Mapping[str, Any]) -> None:
        """``serve run``: what ``serve deploy`` does, where there is no dashboard to ask."""
        file = self._folder.parent / "serve.yaml"
        file.write_text(json.dumps(config))  # JSON is YAML
        done = subprocess.run(
            [str(self.bin_folder / "serve"), "run", str(file), "--non-blocking",
             f"--address={self.address}"],
            env=environment(), capture_output=True, text=True, timeout=START_SECONDS, check=False,
        )  # fmt: skip
        if done.returncode:
            raise environments.Missing(f"serve run failed:\n{(done.stdout + done.stderr)[-3000:]}")

    def watch(self) -> ServeStatusWatcher:
        if self._watcher is None:
            self._watcher = ServeStatusWatcher(self.bin_folder / "python", self.address)
        return self._watcher

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
        for node in reversed(self.nodes):
            node.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def unknown_keys(bin_folder: Path, file: Path) -> str:
    """The error of Ray's schema for a configuration; empty if it is valid."""
    done = subprocess.run(
        [str(bin_folder / "python"), str(INSIDE / "schema.py"), str(file)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return done.stdout[-1000:] if done.returncode else ""


class ServeStatusWatcher:
    """A process that polls ``serve status``."""

    def __init__(self, python: Path, address: str) -> None:
        self._process = subprocess.Popen(
            [str(python), str(INSIDE / "status.py"), address],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        #: monotonic seconds and the status at that time, in order. The reader appends.
        self.history: list[tuple[float, dict[str, Any]]] = []
        self._news: queue.Queue[None] = queue.Queue()
        self._errors: list[str] = []
        for work in (self._read, self._read_errors):
            threading.Thread(target=work, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self.history.append((time.monotonic(), json.loads(line)))
                self._news.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = [*self._errors[-30:], line]

    def until(
        self, what: str, holds: Callable[[Mapping[str, Any]], bool], seconds: float = START_SECONDS
    ) -> float:
        """Wait until a status ``holds``; how long it took.

        Raises:
            AssertionError: none does within ``seconds``, or the application cannot be deployed.
        """
        started = time.monotonic()
        while True:
            left = started + seconds - time.monotonic()
            try:
                self._news.get(timeout=max(0.01, left))
            except queue.Empty:
                last = self.history[-1][1] if self.history else "".join(self._errors)
                raise AssertionError(f"{what}: not within {seconds:g} s: {last}") from None
            _, status = self.history[-1]
            told = status["applications"].get("modelport", {})
            assert told.get("status") != "DEPLOY_FAILED", f"{what}: {told}"
            if holds(status):
                return time.monotonic() - started

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def running(status: Mapping[str, Any], name: str) -> int:
    deployments = status["applications"].get("modelport", {}).get("deployments", {})
    return int(deployments.get(name, {}).get("replica_states", {}).get("RUNNING", 0))


def proxies(status: Mapping[str, Any]) -> int:
    return list(status["proxies"].values()).count("HEALTHY")


@contextlib.contextmanager
def started(workers: int) -> Iterator[Cluster]:
    """A cluster of a head and ``workers``; nothing of it is left behind."""
    bin_folder = programs()
    # The path of a socket has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="mpr-", dir="/tmp") as folder:
        cluster = Cluster(bin_folder, Path(folder) / "r")
        try:
            cluster.start_head()
            for _ in range(workers):
                cluster.add_worker()
            yield cluster
        finally:
            with contextlib.suppress(ValueError):  # Ctrl-C now must not leave half of it behind
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            cluster.close()
