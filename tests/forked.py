"""``modelport`` in processes forked from one that has imported it: a start without the imports.

Importing takes most of the time of a start, and the suite starts hundreds of servers.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait

from modelport.gateway.wire import via_header

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["modelport.gateway.server.app", "onnxruntime"])
#: Python, the loader and malloc read these when a process starts.
_READ_AT_START = ("COVERAGE_", "GLIBC_", "LD_", "MALLOC_", "OMP_", "PYTHON")
#: A new process asks for the ends of the others, and two threads must not read the same one.
_LOCK = threading.Lock()


def _read_at_start() -> dict[str, str]:
    return {name: os.environ[name] for name in os.environ if name.startswith(_READ_AT_START)}


_STARTED_WITH = _read_at_start()


def start(arguments: Sequence[str], may_fork: bool) -> ForkedProcess | subprocess.Popen[str]:
    """Start ``modelport`` with ``arguments``; ``stderr`` is a pipe.

    The process is forked unless the environment has changed in a way that a fork would not see, or
    coverage is measured, which starts with a process. It must not be where a test asks about limits
    that a process inherits, or finds processes by their command line: ``may_fork``.
    """
    measured = "COVERAGE_PROCESS_CONFIG" in os.environ
    if may_fork and not measured and _read_at_start() == _STARTED_WITH:
        return ForkedProcess(arguments)
    command = [sys.executable, "-m", "modelport", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


class ForkedProcess:
    """``modelport`` with ``arguments``, this environment and folder; used as a ``Popen``."""

    def __init__(self, arguments: Sequence[str]) -> None:
        reader, writer = os.pipe()
        with Connection(writer, readable=False) as stderr, _LOCK:
            self._process = _CONTEXT.Process(
                target=_main, args=(stderr, dict(os.environ), arguments), daemon=True
            )
            self._process.start()
        self.stderr = open(reader)  # noqa: SIM115
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        with _LOCK:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        status = self.poll()
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("modelport", timeout)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _main(stderr: Connection, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
    os.dup2(stderr.fileno(), sys.stderr.fileno())
    stderr.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["modelport", *arguments]
    importlib.reload(via_header)  # gateways of the same name would see a loop between them
    from modelport.cli import main

    main()
