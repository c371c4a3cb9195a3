"""A backend that writes down each request it begins and ends: what the server knows it did.

It runs ONNX Runtime behind it. Config parameters: ``delay_seconds`` before each run,
``load_seconds`` that a load takes, ``leak`` not 0: nothing that was loaded is ever freed. The file
is named by ``MODELPORT_LEDGER``; a line is written in one system call, so that not even SIGKILL
tears one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelport.gateway.backends.base import ELSEWHERE, Artifact
from modelport.gateway.backends.embedded import onnxruntime
from modelport.gateway.types import Deadline, InferRequest, InferResponse, finished
from tests.server import Gateway, serving

VARIABLE = "MODELPORT_LEDGER"
HERE = Path(__file__).parent


def load(artifact: Artifact) -> LedgerBackend:
    record(f"load {artifact.version}")
    time.sleep(_parameter(artifact, "load_seconds"))
    return LedgerBackend(artifact)


def _parameter(artifact: Artifact, name: str) -> float:
    parameters: Any = artifact.config.parameters
    return float(parameters[name].string_value) if name in parameters else 0.0


def record(line: str) -> None:
    descriptor = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


#: What leaks.
kept: list[Any] = []


class LedgerBackend:
    problem = ""
    execution = ELSEWHERE

    def __init__(self, artifact: Artifact) -> None:
        self._inner = onnxruntime.load(artifact)
        self.config = self._inner.config
        self._delay_seconds = _parameter(artifact, "delay_seconds")
        self._leak = bool(_parameter(artifact, "leak"))

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        # Dialects that have no id for a request have its values.
        nonce = request.id or request.trace or float(request.inputs[0].data.flat[0])
        record(f"begin {nonce}")
        await asyncio.sleep(self._delay_seconds)
        response = await finished(self._inner(request, deadline))
        record(f"end {nonce}")
        return response

    def unload(self) -> None:
        if self._leak:
            kept.append(self._inner)
        else:
            self._inner.unload()


# -- the test's side ------------------------------------------------------------------------------


class ExecutionLedger:
    """The file in which the backend records its executions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self, kind: str) -> list[str]:
        if not self.path.exists():
            return []
        words = (line.split(" ", 1) for line in self.path.read_text().splitlines())
        return [rest for first, rest in words if first == kind]

    @property
    def begun(self) -> list[str]:
        return self.lines("begin")

    @property
    def ended(self) -> list[str]:
        return self.lines("end")


@contextlib.contextmanager
def recorded(
    repository: Path, ledger: Path, *flags: str, wait_for: str = "started"
) -> Iterator[tuple[Gateway, ExecutionLedger]]:
    """A gateway that has the backend ``ledger``."""
    ledger.unlink(missing_ok=True)
    path = os.pathsep.join([str(HERE / "ledger_site"), str(HERE.parents[1])])
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", VARIABLE)}
    os.environ.update({"PYTHONPATH": path, VARIABLE: str(ledger)})
    try:
        context = serving(repository, *flags, wait_for=wait_for)
        gateway = context.__enter__()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    try:
        yield gateway, ExecutionLedger(ledger)
    finally:
        context.__exit__(None, None, None)


def parameter(name: str, value: float) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
