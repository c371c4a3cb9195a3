"""A model that another server runs: the server may come late, go, and come back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelport.loadtests.system.processes import free_ports
from tests import models
from tests.faults import probes
from tests.faults.probes import ChangingRepository
from tests.polling import eventually
from tests.server import Gateway, serving

ROUTES = """
[models.m]
backend = "triton"
endpoints = ["127.0.0.1:{port}"]
protocol = "{protocol}"
"""
ALL = "version_policy { all { } }"


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> str:
    word: str = request.param
    return word


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@contextlib.contextmanager
def upstream(repository: ChangingRepository, protocol: str, port: int) -> Iterator[Gateway]:
    with serving(repository.root, f"--{protocol}-port", str(port)) as gateway:
        yield gateway


@contextlib.contextmanager
def routed(tmp_path: Path, protocol: str, port: int, *flags: str) -> Iterator[Gateway]:
    """A gateway whose own repository is empty."""
    file, empty = tmp_path / "modelport.toml", tmp_path / "empty"
    file.write_text(ROUTES.format(port=port, protocol=protocol))
    empty.mkdir()
    with serving(empty, "--routes", str(file), *flags) as gateway:
        yield gateway


@pytest.mark.thorough
def test_a_server_that_comes_late_and_is_killed_and_comes_back(
    repository: ChangingRepository, tmp_path: Path, protocol: str, port: int
) -> None:
    repository.version(2.0, 1, config=ALL)
    repository.version(3.0, 2)
    with routed(tmp_path, protocol, port) as gateway:
        assert probes.live(gateway)
        assert not probes.ready(gateway)
        ((state, reason),) = probes.index(gateway).values()
        assert state == "UNAVAILABLE"
        assert reason
        assert "127.0.0.1" not in reason
        assert probes.ask(gateway).status_code == 503
        with upstream(repository, protocol, port) as server:
            eventually(lambda: probes.ready(gateway), "ready")
            eventually(lambda: probes.state(gateway, 1) == "READY", "version 1, too")
            assert probes.answer(gateway) == ("2", 3.0)
            assert probes.answer(gateway, number=1) == ("1", 2.0)
            server.process.kill()
            server.process.wait()
            assert probes.ask(gateway).status_code == 503
            assert probes.status(gateway, "/v2/models/m") == 200, "metadata is known"
        with upstream(repository, protocol, port):
            eventually(lambda: probes.ask(gateway).status_code == 200, "it answers again")
            eventually(lambda: probes.ready(gateway), "ready again")
            assert probes.answer(gateway) == ("2", 3.0)


def test_a_version_that_a_starting_server_loads_last_is_served_too(
    repository: ChangingRepository, tmp_path: Path, protocol: str, port: int
) -> None:
    repository.version(3.0, 2, config=ALL)
    broken = repository.root / "m" / "1" / "model.onnx"
    broken.parent.mkdir()
    broken.write_bytes(b"no model")
    # It is not ready before this model is loaded.
    repository.slow_to_load(4, "late")
    flags = (f"--{protocol}-port", str(port))
    retries = ("--model-load-retry-count", "1000", "--load-retry-interval-secs", "0.05")
    with (
        serving(repository.root, *flags, *retries, wait_for="model version is ready"),
        routed(tmp_path, protocol, port) as gateway,
    ):
        assert probes.answer(gateway) == ("2", 3.0)
        models.multiply(broken, 2.0)
        eventually(lambda: probes.state(gateway, 1) == "READY", "version 1")
        assert probes.answer(gateway, number=1) == ("1", 2.0)
