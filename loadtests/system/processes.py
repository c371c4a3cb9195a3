"""Servers as child processes: free ports, readiness, orderly shutdown."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from modelport.gateway.runtime.child_process import ChildProcess
from modelport.gateway.upstream import connection_errors
from modelport.loadtests.system import process_tree

HOST = "127.0.0.1"
#: Below the ephemeral ports of Linux, and of the IANA.
PORTS = range(20_000, 32_000)
READY_SECONDS = 120.0
STOP_SECONDS = 20.0
#: Far below the start-up time of any server.
POLL_SECONDS = 0.005
#: Waits for the end of its input, then ends the given process group.
GUARD = 'read _; kill -s TERM -- "-$0"; sleep 3; kill -s KILL -- "-$0"'


class ServerFailed(RuntimeError):
    """The server did not start, or did not end when asked."""


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different.

    They are below the kernel's ephemeral ports, which clients could take meanwhile.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.sample(PORTS, 1000):
            if len(found) == count:
                break
            candidate = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                candidate.bind((HOST, port))
                found.append(port)
    return found


def wait_ready(
    ready: str | Callable[[], bool],
    process: subprocess.Popen[Any] | None,
    log: Path | None,
    seconds: float = READY_SECONDS,
) -> None:
    """Return once ``ready`` holds; raise with the log's tail if it never does. As for `running`."""
    began, last = time.monotonic(), ""
    while time.monotonic() - began < seconds:
        if process is not None and process.poll() is not None:
            raise ServerFailed(f"exited with {process.returncode} before it was ready\n{tail(log)}")
        try:
            if _answers(ready) if isinstance(ready, str) else ready():
                return
        except (OSError, http.client.HTTPException, ValueError) as error:
            last = f": {connection_errors.reason(error)}"
        time.sleep(POLL_SECONDS)
    where = f"{ready} " if isinstance(ready, str) else ""
    raise ServerFailed(f"{where}not ready after {seconds:.0f} s{last}\n{tail(log)}")


def _answers(url: str) -> bool:
    with urllib.request.urlopen(url, timeout=2):
        return True


def tail(log: Path | None, length: int = 3000) -> str:
    return "" if log is None else log.read_text(errors="replace")[-length:]


@contextlib.contextmanager
def _guarded(process: ChildProcess) -> Iterator[None]:
    """Make sure that the process' group does not outlive this process, even after ``kill -9``.

    The signal at this process' death reaches only the child; TorchServe's is a launcher, and its
    JVM would stay. A pipe closes however its holder ends.
    """
    guard = ChildProcess(
        ["sh", "-c", GUARD, str(process.pid)],
        parent_death=None,
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


@contextlib.contextmanager
def running(
    command: Sequence[str],
    *,
    log: Path,
    ready: str | Callable[[], bool],
    cores: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    ready_seconds: float = READY_SECONDS,
    must_stop: bool = True,
) -> Iterator[ChildProcess]:
    """Run a server, ready inside the block and gone after it.

    Args:
        log: the file for its output.
        ready: a URL that answers 200, or one check; an ``OSError`` counts as not ready.
        cores: its cores; none: all.
        env: variables in addition to those of this process.
        must_stop: a server that does not end when asked is an error. It is killed in any case.

    Raises:
        ServerFailed: it ended, was not ready in time, or did not stop; with the log's tail.
    """
    process = ChildProcess(
        command,
        log=log,
        cores=cores,
        parent_death=signal.SIGTERM,
        env={**os.environ, **(env or {})},
        cwd=cwd,
    )
    try:
        with _guarded(process):
            wait_ready(ready, process, log, ready_seconds)
            yield process
    finally:
        family = list(process_tree.processes(process.pid))[1:]
        try:
            killed = process.stop(STOP_SECONDS)
        finally:
            for left in family:  # in sessions of their own
                with contextlib.suppress(psutil.Error):
                    left.kill()
    if killed and must_stop:
        raise ServerFailed(f"still there {STOP_SECONDS:.0f} s after SIGTERM\n{tail(log)}")
