"""``modelport`` in processes forked from one that has imported it: a start without the imports.

Importing takes most of the time of a start, and the suite starts hundreds of servers. A forked
gateway forks its workers, too.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Collection, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from modelport.gateway.runtime.child_process import ChildProcess
from modelport.gateway.server.workers import process
from modelport.gateway.wire import via_header
from tests.logs import forget_logs

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["modelport.gateway.server.app", "onnxruntime"])
#: Python, the loader and malloc read these when a process starts.
_READ_AT_START = ("COVERAGE_", "GLIBC_", "LD_", "MALLOC_", "OMP_", "PYTHON")
#: A new process asks for the ends of the others, and two threads must not read the same one.
_LOCK = threading.Lock()


def _read_at_start() -> dict[str, str]:
    return {name: os.environ[name] for name in os.environ if name.startswith(_READ_AT_START)}


_STARTED_WITH = _read_at_start()
_PATH = "PYTHONPATH"
#: First on the path of a gateway with the ledger: a fork runs its ``sitecustomize``, which adds to
#: what is imported and changes nothing.
_LEDGER = Path(__file__).parent / "faults" / "ledger_site"


def start(arguments: Sequence[str], may_fork: bool) -> ForkedProcess | subprocess.Popen[str]:
    """Start ``modelport`` with ``arguments``; ``stderr`` is a pipe.

    The process is forked unless the environment has changed in a way that a fork would not see, or
    coverage is measured, which starts with a process. It must not be where a test asks about limits
    that a process inherits, or finds processes by their command line: ``may_fork``.
    """
    measured = "COVERAGE_PROCESS_CONFIG" in os.environ
    changed = {name for name, _ in _read_at_start().items() ^ _STARTED_WITH.items()}
    first = os.environ.get(_PATH, "").partition(os.pathsep)[0]
    seen = not changed or (changed == {_PATH} and first == str(_LEDGER))
    if may_fork and not measured and seen:
        return ForkedProcess(arguments)
    command = [sys.executable, "-m", "modelport", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


class ForkedProcess:
    """``modelport`` with ``arguments``, this environment and folder; used as a ``Popen``."""

    def __init__(self, arguments: Sequence[str]) -> None:
        reader, writer = os.pipe()
        with Connection(writer, readable=False) as stderr, _LOCK:
            _start_server()
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
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _start_server() -> None:
    """Start the process that forks, which must not run what a test has put on its path."""
    now = dict(os.environ)
    os.environ.pop(_PATH, None)
    os.environ.update({name: _STARTED_WITH[name] for name in (_PATH,) if name in _STARTED_WITH})
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop(_PATH, None)
        os.environ.update(now)


def _main(stderr: Connection, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
    os.dup2(stderr.fileno(), sys.stderr.fileno())
    stderr.close()
    if environment.get(_PATH) != os.environ.get(_PATH):
        folders = environment.get(_PATH, "").split(os.pathsep)
        sys.path[:0] = folders
        runpy.run_path(str(_LEDGER / "sitecustomize.py"))
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["modelport", *arguments]
    importlib.reload(via_header)  # gateways of the same name would see a loop between them
    process.ChildProcess = ForkedWorker  # type: ignore[misc]
    from modelport.cli import main

    main()


class ForkedWorker(ChildProcess):
    """A worker of a forked gateway, which goes on with what its parent has imported."""

    def _execute_child(self, command: Any, executable: Any, setup: Any, *given: Any) -> None:
        def run() -> None:
            setup()
            _run_worker(command[4:], kept, environment)

        _, kept, _, environment, *_ = given
        super()._execute_child(command, executable, run, *given)  # type: ignore[misc]


def _run_worker(
    arguments: Sequence[str], kept: Collection[int], environment: Mapping[str, str]
) -> None:
    """Run a worker in place of its parent, whose objects stay in the frames below this one."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python does when it starts
        signal.signal(ignored, signal.SIG_IGN)
    for name in os.listdir("/proc/self/fd"):
        if (number := int(name)) > 2 and number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    forget_logs()
    importlib.reload(via_header)
    status = 1
    try:
        exec(process._MAIN, {"__name__": "__main__"})  # it ends the process unless it fails
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else status
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
