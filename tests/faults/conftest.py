from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.probes import ChangingRepository


@pytest.fixture
def repository(tmp_path: Path) -> ChangingRepository:
    root = tmp_path / "repository"
    root.mkdir()
    return ChangingRepository(root)


@pytest.fixture
def background() -> Iterator[Callable[..., Future[Any]]]:
    """``background(function, *arguments)`` runs it in a thread; the future has its outcome."""
    with ThreadPoolExecutor(8) as threads:
        yield threads.submit
