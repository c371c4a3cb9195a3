"""Gateways on fixed ports, so that clients find them again after a restart."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from modelport.gateway.cli.admin_client import AdminClient
from modelport.gateway.errors import ModelportError
from modelport.loadtests.system.processes import free_ports
from tests import models
from tests.forked import ForkedProcess
from tests.rollout_faults.clients import FACTORS, LABEL, MODEL
from tests.server import Gateway

PATH = f"/v2/rollouts/{MODEL}"
LOOK_SECONDS = 0.05
ONLY_1 = f"""version_policy {{ specific {{ versions: 1 }} }}
parameters {{ key: "version_label.{LABEL}" value {{ string_value: "1" }} }}
"""
ROUTE = """
[models.remote]
backend = "triton"
endpoints = ["127.0.0.1:{port}"]
model = "x2"
version = "1"
"""


def repository(root: Path) -> Path:
    """Versions 1 and 2, which compute the same, and 3, which does not."""
    for version in "123":
        models.multiply(root / MODEL / version / "model.onnx", FACTORS[version])
    (root / MODEL / "config.pbtxt").write_text(models.X2_CONFIG + ONLY_1)
    return root


def remote_repository(root: Path) -> Path:
    models.multiply(root / MODEL / "1/model.onnx", FACTORS["remote/1"])
    (root / MODEL / "config.pbtxt").write_text(models.X2_CONFIG)
    return root


class BrokenGateway(Gateway):
    """A gateway of ``broken_gateway.VARIANTS``; with an empty variant, one that is whole."""

    def __init__(self, variant: str, repository: Path, *flags: str) -> None:
        self._variant = variant
        super().__init__(repository, *flags)

    def _start(
        self, arguments: Sequence[str], may_fork: bool
    ) -> ForkedProcess | subprocess.Popen[str]:
        if not self._variant:
            return super()._start(arguments, may_fork)
        program = [sys.executable, "-m", "tests.rollout_faults.broken_gateway", self._variant]
        return subprocess.Popen([*program, *arguments], stderr=subprocess.PIPE, text=True)


class GatewayPlace(NamedTuple):
    """A gateway's repository, flags and ports; ``start`` begins a new life of it."""

    root: Path
    flags: tuple[str, ...]
    http_port: int
    grpc_port: int
    metrics_port: int
    variant: str = ""

    def start(self) -> Gateway:
        ports = [
            *("--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port)),
            *("--metrics-port", str(self.metrics_port)),
        ]
        return BrokenGateway(self.variant, self.root, *self.flags, *ports)

    @property
    def admin(self) -> AdminClient:
        return AdminClient(f"http://127.0.0.1:{self.metrics_port}")


def place(root: Path, *flags: str, variant: str = "") -> GatewayPlace:
    http_port, grpc_port, metrics_port = free_ports(3)
    return GatewayPlace(root, flags, http_port, grpc_port, metrics_port, variant)


class Look(NamedTuple):
    """A status, and when its answer came."""

    at: float
    state: dict[str, Any]


class StatusWatcher:
    """Looks at the status of a rollout all the time, while the gateway responds."""

    def __init__(self, admin: AdminClient) -> None:
        self.looks: list[Look] = []
        self._admin = admin
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            try:
                state = self._admin.get(PATH)
            except ModelportError:
                continue
            self.looks.append(Look(time.monotonic(), state))

    def finish(self) -> None:
        self._stop.set()
        self._thread.join(30)

    def first(self, **fields: Any) -> Look | None:
        """The first look at a state with these fields."""
        for look in tuple(self.looks):
            if fields.items() <= look.state.items():
                return look
        return None
