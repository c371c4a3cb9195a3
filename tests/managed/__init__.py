"""Servers that the gateway starts: stand-ins for the default suite, the real ones for a verb."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from tests import models
from tests.polling import eventually
from tests.server import Gateway, serving

ROOT = Path(__file__).parents[2]
STANDIN = Path(__file__).with_name("standin.py")
#: Of a request.
DEADLINE_SECONDS = 2.0
#: In the environment of everything that a test's servers start.
MARK = "MODELPORT_TEST_MARK"
X = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


@dataclass(frozen=True)
class ManagedOutcome:
    at: float
    seconds: float
    status: int
    body: str


def ask(gateway: Gateway, path: str, document: Any = None) -> ManagedOutcome:
    """POST where there is a document. Status 0: no whole answer."""
    data = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(f"http://{gateway.http}{path}", data)
    started = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            status, body = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            status, body = error.code, error.read().decode()
    except OSError as error:
        status, body = 0, repr(error)
    return ManagedOutcome(started, time.monotonic() - started, status, body)


def infer(gateway: Gateway, model: str = "x2", document: Any = None) -> ManagedOutcome:
    parameters = {"timeout": int(DEADLINE_SECONDS * 1e6)}
    return ask(gateway, f"/v2/models/{model}/infer", {**(document or X), "parameters": parameters})


def reason(gateway: Gateway, model: str = "x2") -> str:
    """The reason in the repository index; '' if the model is READY."""
    rows = json.loads(ask(gateway, "/v2/repository/index", {}).body)
    (row,) = [row for row in rows if row["name"] == model]
    return "" if row.get("state") == "READY" else str(row.get("reason", ""))


@dataclass
class ManagedPlace:
    """A repository with the model ``x2``, and a route that has a stand-in serve it."""

    root: Path
    protocol: str = "grpc"
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.repository, self.mode = self.root / "models", self.root / "mode"
        models.multiply(self.repository / "x2" / "1" / "model.onnx")
        (self.repository / "x2" / "config.pbtxt").write_text(models.X2_CONFIG)
        (self.root / "tmp").mkdir()

    def does(self, mode: str) -> ManagedPlace:
        """From the next start on."""
        self.mode.write_text(mode)
        return self

    def routes(self, command: list[str] | None = None, start_seconds: float = 30) -> Path:
        command = command or [sys.executable, str(STANDIN), str(self.mode)]
        file = self.root / "modelport.toml"
        file.write_text(
            f'[models.x2]\nbackend = "triton"\nmanaged = true\nprotocol = "{self.protocol}"\n'
            f"[servers.triton]\ncommand = {json.dumps(command)}\n"
            f"start_timeout_seconds = {start_seconds}\n"
            f'environment = {{PYTHONPATH = "{ROOT}", {MARK} = "{self.root}"}}\n'
        )
        return file

    @contextlib.contextmanager
    def serving(self, *flags: str, routes: Path | None = None, **how: Any) -> Iterator[Gateway]:
        """A gateway whose temporary folder is below ``root``. Nothing of its servers is left."""
        file = routes or self.routes()
        before, os.environ["TMPDIR"] = os.environ.get("TMPDIR"), str(self.root / "tmp")
        try:
            running = serving(self.repository, "--routes", str(file), *flags, **how)
            with running as gateway:
                yield gateway
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before

    def processes(self, word: str = "") -> list[int]:
        """The ids of this place's processes with ``word`` in their command line."""
        return processes(self.root, word)

    def server(self) -> int:
        """The stand-in itself, not its guardian."""
        found: list[int] = eventually(lambda: self.processes("\0modelport\0"), "the server runs")
        return found[0]

    def folders(self) -> list[Path]:
        return list((self.root / "tmp").glob("modelport-managed-*"))

    def nothing_is_left(self) -> None:
        eventually(lambda: not self.processes(), "no process is left", 15)
        eventually(lambda: not self.folders(), "no folder is left", 15)


def processes(mark: Path, word: str = "") -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                environment = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes()
                if f"{MARK}={mark}".encode() in environment and word.encode() in command:
                    found.append(int(folder.name))
    return found


@contextlib.contextmanager
def load(gateway: Gateway, clients: int = 4, model: str = "x2", document: Any = None) -> Any:
    """Requests all the time; the list of their outcomes, whole when the block has ended."""
    stop, outcomes = Event(), []

    def client() -> None:
        while not stop.is_set():
            outcomes.append(infer(gateway, model, document))
            stop.wait(0.002)

    with ThreadPoolExecutor(clients) as threads:
        running = [threads.submit(client) for _ in range(clients)]
        try:
            yield outcomes
        finally:
            stop.set()
    for each in running:
        each.result()


def wrong(outcomes: list[ManagedOutcome], killed_at: float, model: str = "x2") -> list[str]:
    """List wrong outcomes of a server that was killed at ``killed_at`` and has restarted."""
    problems = []
    for outcome in outcomes:
        if outcome.status not in (200, 503):
            problems.append(f"status {outcome.status}: {outcome.body}")
        if outcome.status == 503 and f"'{model}'" not in outcome.body:
            problems.append(f"no reason: {outcome.body}")
    after = [outcome for outcome in outcomes if outcome.at > killed_at]
    if not any("it is being restarted" in outcome.body for outcome in after):
        problems.append("nobody was told that it is being restarted")
    refused = [index for index, outcome in enumerate(after) if outcome.status != 200]
    if not refused or refused[-1] == len(after) - 1:
        problems.append("it was not down, or is not back")
    return sorted(set(problems))
