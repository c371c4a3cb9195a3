"""Envoy with the probe in it, started as the gateway starts it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from gateway.front.envoy import configuration, launch
from gateway.settings import Settings
from tests.conformance import wire

APPLICATION = "tests.front.probe:application"
START_SECONDS = 30.0


@dataclass(frozen=True)
class Envoy:
    http_port: int
    grpc_port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def http(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def journal(self) -> list[str]:
        entries: list[str] = wire.send(self.http, "GET", "/journal").json
        return entries

    def wait_for(self, entry: str, seconds: float = 10.0) -> float:
        """Seconds until the journal has ``entry``."""
        started = time.monotonic()
        while entry not in self.journal():
            assert time.monotonic() - started < seconds, f"no {entry!r}: {self.journal()}"
        return time.monotonic() - started


@contextlib.contextmanager
def envoy(requests: dict[str, float] | None = None, **constants: Any) -> Iterator[Envoy]:
    """``constants`` of the configuration, and of ``requests``, that are to be others."""
    with (
        contextlib.ExitStack() as stack,
        mock.patch.dict(vars(configuration), constants),
        tempfile.TemporaryDirectory() as name,
    ):
        folder = Path(name)
        ports = [stack.enter_context(reserved()).getsockname()[1] for _ in range(2)]
        settings = Settings((), http_port=ports[0], grpc_port=ports[1])
        argv, variables = launch.command(settings, folder, APPLICATION)
        probe = json.dumps({"ports": ports, "constants": requests or {}})
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv,
                env={**os.environ, **variables, "MODELPORT_PROBE": probe},
                stdout=output,
                stderr=output,
            )
        try:
            _await(ports, process, log)
            yield Envoy(ports[0], ports[1], process, log)
        finally:
            process.kill()
            process.wait()


def reserved() -> socket.socket:
    """A port that is ours and that Envoy can listen on too."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _await(ports: list[int], process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    for port in ports:
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.01)
