"""At the limit of open files: connections stop short of it, and the rest of the gateway goes on."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.faults.probes import POLL, ChangingRepository
from tests.polling import eventually
from tests.server import Gateway, serving

FILES = 400


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[tuple[Gateway, ChangingRepository]]:
    """A gateway with few files, and more connections to both ports than it has files."""
    repository = ChangingRepository(tmp_path / "repository")
    repository.version(2.0)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, before[1]))
    try:
        with (
            serving(repository.root, *POLL, may_fork=False) as gateway,
            contextlib.ExitStack() as stack,
        ):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 4 * FILES), before[1]))
            for port in (gateway.http_port, gateway.grpc_port):
                for _ in range(FILES):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            yield gateway, repository
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.thorough
def test_health_metrics_and_polling_go_on_where_connections_have_all_files_they_may(
    crowded: tuple[Gateway, ChangingRepository],
) -> None:
    gateway, repository = crowded
    assert httpx.get(gateway.metrics).status_code == 200

    def healthy() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://{gateway.http}/v2/health/ready").status_code == 200
        return False

    eventually(healthy, "those who only hold the places for health are let go")
    refused = httpx.get(f"http://{gateway.http}/v2")
    assert (refused.status_code, refused.json()) == (503, {"error": "too many connections"})
    repository.version(3.0, 2)
    gateway.wait_for("model version is ready", version=2)
    assert not [entry for entry in gateway.logs if "Traceback" in str(entry)]
