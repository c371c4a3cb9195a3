"""Fixtures shared by several modules."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from modelport.gateway.inference.shared_memory import FOLDER
from tests.gateway.repository.storage.moto_server import ENVIRONMENT, Moto

#: Makes a shared memory object of a size that begins with a content; returns its key.
NewObject = Callable[..., str]


@pytest.fixture
def new_object() -> Iterator[NewObject]:
    """Makes objects, as clients do; they are gone afterwards."""
    made: list[Path] = []

    def create(size: int = 64, content: bytes = b"") -> str:
        path = Path(FOLDER) / f"test-regions-{os.getpid()}-{len(made)}"
        path.write_bytes(content.ljust(size, b"\0"))
        made.append(path)
        return f"/{path.name}"

    yield create
    for path in made:
        path.unlink(missing_ok=True)


@pytest.fixture
def storage_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials that must be told nowhere, and a cache of the test's own."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moto]:
    """An S3 server of the module's tests, each with its ``prefix``."""
    server = Moto(tmp_path_factory.mktemp("moto") / "log")
    yield server
    server.close()


@pytest.fixture
def own_moto(tmp_path: Path) -> Iterator[Moto]:
    """One that the test may end, or do with what it likes."""
    server = Moto(tmp_path / "moto.log")
    yield server
    server.close()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """The test's name."""
    return str(request.node.name)
