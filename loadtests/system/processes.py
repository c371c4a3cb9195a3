"""Servers as child processes: free ports, pinned cores, logs, readiness, orderly shutdown."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
#: Below the ephemeral ports of Linux, and of the IANA.
PORTS = range(20_000, 32_000)
READY_SECONDS = 120.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.1
#: Waits for the end of its input, then ends the given process group.
GUARD = 'read _; kill -s TERM -- "-$0"; sleep 3; kill -s KILL -- "-$0"'
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class ServerFailed(RuntimeError):
    """The server did not start, or did not end when asked."""


class Interruption:
    """State of Ctrl-C: ``held`` back, and ``waiting`` to be raised."""

    held = waiting = False


def interrupt(number: int, frame: object) -> None:
    """Handle a signal by an exception, so that every ``finally`` runs."""
    if Interruption.held:
        Interruption.waiting = True
    else:
        raise KeyboardInterrupt


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """``subprocess.Popen`` with signals held back until the child is registered.

    Python runs callbacks when it forks, and swallows what a handler raises inside one.

    Raises:
        KeyboardInterrupt: ``interrupt`` was called meanwhile; the child is gone.
    """
    Interruption.held, process = True, None
    try:
        process = subprocess.Popen(list(command), **options)
        return process
    finally:
        Interruption.held = False
        if Interruption.waiting:
            Interruption.waiting = False
            if process is not None:
                process.kill()
                process.wait()
            raise KeyboardInterrupt


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


def wait_ready(url: str, process: subprocess.Popen[bytes] | None, log: Path | None) -> None:
    """Return once `url` answers 200; raise with the log's tail if it never does."""
    give_up = time.monotonic() + READY_SECONDS
    last = "no answer"
    while time.monotonic() < give_up:
        if process is not None and process.poll() is not None:
            raise ServerFailed(f"exited with {process.returncode} before it was ready\n{tail(log)}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except urllib.error.HTTPError as error:
            last = f"HTTP {error.code}"
        except OSError as error:
            last = str(error)
        time.sleep(POLL_SECONDS)
    raise ServerFailed(f"{url} not ready after {READY_SECONDS:.0f} s: {last}\n{tail(log)}")


def tail(log: Path | None, length: int = 3000) -> str:
    return "" if log is None else log.read_text(errors="replace")[-length:]


def die_with_parent() -> None:
    """In a child before its program begins: get SIGTERM when the starting thread ends.

    This also covers ``kill -9``, and Ctrl-C before the ``try``.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextlib.contextmanager
def guarded(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Make sure that the process' group does not outlive this process, even after ``kill -9``.

    The signal of ``die_with_parent`` reaches only the child; TorchServe's is a launcher, and its
    JVM would stay. A pipe closes however its holder ends.
    """
    guard = start(
        ["sh", "-c", GUARD, str(process.pid)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


def pinned(core: int | None) -> None:
    """Pin the calling process and its children to one core."""
    if core is not None:
        os.sched_setaffinity(0, {core})


@contextlib.contextmanager
def running(
    command: Sequence[str],
    *,
    log: Path,
    ready: str,
    core: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    must_stop: bool = True,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server, ready inside the block and gone after it.

    A server that does not end when asked is killed, and `must_stop` makes that an error.
    """
    with log.open("wb") as out:
        process = start(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
            preexec_fn=lambda: pinned(core),
        )
    try:
        wait_ready(ready, process, log)
        yield process
    finally:
        killed = stop(process)
    if killed and must_stop:
        raise ServerFailed(f"still there {STOP_SECONDS:.0f} s after SIGTERM\n{tail(log)}")


def stop(process: subprocess.Popen[bytes]) -> bool:
    """End the process and its group; return True if it had to be killed."""
    killed = False
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            killed = True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return killed
