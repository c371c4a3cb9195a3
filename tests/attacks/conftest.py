"""A real gateway with a small limit on bodies, for hostile clients."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import repository, wire
from tests.conformance.wire import KeptConnection
from tests.server import Gateway, serving

MAX_INPUT_BYTES = 8 * 1024 * 1024


def peak_bytes(gateway: Gateway) -> int:
    """The most memory that the server has ever held."""
    text = Path(f"/proc/{gateway.process.pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", text)
    assert match
    return int(match[1]) * 1024


def cpu_seconds(gateway: Gateway) -> float:
    """The processor time that the server has taken."""
    fields = Path(f"/proc/{gateway.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = repository.build(tmp_path_factory.mktemp("attacks") / "models")
    with serving(root, "--http-max-input-size", str(MAX_INPUT_BYTES)) as served:
        yield served


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as created:
        yield created


@pytest.fixture(scope="session")
def stub(gateway: Gateway) -> Iterator[Any]:
    with wire.stub(gateway.grpc) as opened:
        yield opened


@pytest.fixture
def connection(gateway: Gateway) -> Iterator[KeptConnection]:
    """A client that does no wrong: after every test it is still served."""
    opened = KeptConnection(gateway.http)
    wire.assert_serves(opened)
    yield opened
    wire.assert_serves(opened)
    opened.close()
