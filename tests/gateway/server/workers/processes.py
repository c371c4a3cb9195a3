"""The processes of a gateway, and clients that reach each of its workers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.faults import probes
from tests.server import Gateway

TWO = ("--workers", "2")
slow = pytest.mark.skipif(
    not os.environ.get("MODELPORT_SLOW_TESTS"), reason="slow; `make workers` runs it"
)
#: Connections that all reach the same one of two workers by chance: once in 2^20.
CONNECTIONS = 20
T = TypeVar("T")


def workers(gateway: Gateway) -> dict[int, int]:
    """Number of the worker → process."""
    return {int(role): process for process, role in _roles(gateway) if role.isdigit()}


def spare(gateway: Gateway) -> set[int]:
    """The process that waits to take a worker's place."""
    return {process for process, role in _roles(gateway) if role == "spare"}


def _roles(gateway: Gateway) -> Iterator[tuple[int, str]]:
    for process in _children(gateway.process.pid):
        try:
            name = Path(f"/proc/{process}/comm").read_text()
        except OSError:
            continue
        kind, _, role = name.strip().partition(":")
        if kind == "modelport":
            yield process, role


def _children(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_bytes()
            except OSError:
                continue
            if int(stat.rpartition(b")")[2].split()[1]) == parent:
                found.append(int(folder.name))
    return found


def running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state != b"Z"


class WorkerConnection:
    """One connection, to whichever worker it reaches."""

    def __init__(self, gateway: Gateway, timeout_seconds: float = 30.0) -> None:
        port = gateway.http_port
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_seconds)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Status and text."""
        content = None if body is None else json.dumps(body)
        self._connection.request(method, path, content, {"content-type": "application/json"})
        reply = self._connection.getresponse()
        return reply.status, reply.read().decode()

    def get(self, path: str) -> Any:
        status, text = self.ask("GET", path)
        assert status == 200, text
        return json.loads(text)

    def close(self) -> None:
        self._connection.close()


def everywhere(gateway: Gateway, ask: Callable[[WorkerConnection], T]) -> list[T]:
    """The answers on many connections, enough for both of two workers."""
    answers = []
    for _ in range(CONNECTIONS):
        with contextlib.closing(WorkerConnection(gateway)) as connection:
            answers.append(ask(connection))
    return answers


def statistics(gateway: Gateway, model: str = "m") -> list[dict[str, Any]]:
    """A model's statistics on many connections."""
    path = f"/v2/models/{model}/stats"
    return everywhere(gateway, lambda connection: connection.get(path)["model_stats"][0])


def replies(gateway: Gateway, model: str = "m") -> set[tuple[int, str]]:
    """The distinct answers to an inference request on many connections."""
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}]}
    path = f"/v2/models/{model}/infer"
    return set(everywhere(gateway, lambda connection: connection.ask("POST", path, body)))


def factors(gateway: Gateway, model: str = "m") -> set[float]:
    """The distinct factors of the workers' models."""
    found = set()
    for status, text in replies(gateway, model):
        assert status == 200, text
        found.add(float(json.loads(text)["outputs"][0]["data"][0]))
    return found


def statuses(gateway: Gateway, model: str = "m") -> set[int]:
    return {status for status, _ in replies(gateway, model)}


def indexes(gateway: Gateway) -> set[str]:
    path = "/v2/repository/index"
    return {text for _, text in everywhere(gateway, lambda c: c.ask("POST", path))}


def served(gateway: Gateway, model: str = "m") -> float:
    return probes.metric(gateway, "request_success", model=model)


def bindable(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
        return True


def folders(temporary: Path) -> list[str]:
    """Files of the gateway in its temporary folder, without ONNX Runtime's."""
    return sorted(set(os.listdir(temporary)) - {".ses"})
