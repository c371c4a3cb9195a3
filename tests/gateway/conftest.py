"""What the tests of several modules need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.shared_memory import FOLDER

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
