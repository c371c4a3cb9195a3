"""A real ``modelport serve`` in a process of its own, on ports that the system chose.

``MODELPORT_WORKERS`` is the flag ``--workers`` of every one of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests import forked

START_SECONDS = 60.0
#: `make coverage`: a process that is killed takes its figures with it.
MEASURED = "COVERAGE_PROCESS_CONFIG" in os.environ
FLAGS = ["--workers", count] if (count := os.environ.get("MODELPORT_WORKERS")) else []


class Gateway:
    """A running gateway. ``logs`` is everything it has said, one parsed JSON object a line."""

    def __init__(
        self,
        repository: Path,
        *flags: str,
        wait_for: str = "started",
        may_fork: bool = True,
        log_file: Path | None = None,
    ) -> None:
        self.logs: list[dict[str, Any]] = []
        self._log_file = log_file
        self._changed = threading.Condition()
        arguments = [
            *("serve", "--model-repository", str(repository)),
            *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
            *("--log-format", "json", *FLAGS, *flags),
        ]
        self.process = self._start(arguments, may_fork)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            listening = self.wait_for("listening")
            self.wait_for(wait_for)
        except BaseException:
            self.close()
            raise
        self.http_port: int = listening["http_port"]
        self.grpc_port: int = listening["grpc_port"]
        self.metrics_port: int = listening["metrics_port"]

    def _start(
        self, arguments: Sequence[str], may_fork: bool
    ) -> forked.ForkedProcess | subprocess.Popen[str]:
        return forked.start(arguments, may_fork)

    @property
    def http(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def metrics(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    def _read(self) -> None:
        assert self.process.stderr is not None
        with open(self._log_file or os.devnull, "w", buffering=1) as copy:
            for line in self.process.stderr:
                copy.write(line)
                try:
                    entry = json.loads(line)
                except ValueError:
                    entry = {"event": line.rstrip()}
                with self._changed:
                    self.logs.append(entry)
                    self._changed.notify_all()
        with self._changed:
            self.logs.append({"event": "<closed>"})
            self._changed.notify_all()

    def wait_for(self, event: str, after: int = 0, **fields: Any) -> dict[str, Any]:
        """The first log entry from index ``after`` on with this event and these fields.

        Fails at once when the process has ended, and after ``START_SECONDS`` otherwise.
        """

        def found() -> dict[str, Any] | None:
            for entry in self.logs[after:]:
                if entry.get("event") == event and fields.items() <= entry.items():
                    return entry
            return None

        with self._changed:
            ok = self._changed.wait_for(
                lambda: found() or self.logs[-1:] == [{"event": "<closed>"}], START_SECONDS
            )
            entry = found()
        assert ok, f"no {event!r} within {START_SECONDS} s: {self.logs}"
        assert entry is not None, f"the gateway ended before {event!r}: {self.logs}"
        return entry

    def terminate(self, timeout_seconds: float = 30.0) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            if MEASURED:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.terminate()
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        if self.process.stderr is not None:
            self.process.stderr.close()


@contextlib.contextmanager
def serving(repository: Path, *flags: str, **options: Any) -> Iterator[Gateway]:
    gateway = Gateway(repository, *flags, **options)
    try:
        yield gateway
    finally:
        gateway.close()
