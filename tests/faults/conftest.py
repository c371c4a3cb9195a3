from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.probes import Repository

LAG_STEP_SECONDS = 0.01


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    root = tmp_path / "repository"
    root.mkdir()
    return Repository(root)


@pytest.fixture
def lag() -> Iterator[Callable[[], float]]:
    """How late, at worst, this busy machine has woken a thread while the test ran, in seconds."""
    stop, worst = threading.Event(), 0.0

    def watch() -> None:
        nonlocal worst
        while not stop.is_set():
            started = time.monotonic()
            time.sleep(LAG_STEP_SECONDS)
            worst = max(worst, time.monotonic() - started - LAG_STEP_SECONDS)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield lambda: worst
    stop.set()
    watcher.join()


@pytest.fixture
def background() -> Iterator[Callable[..., Future[Any]]]:
    """``background(function, *arguments)`` runs it in a thread; the future has its outcome."""
    with ThreadPoolExecutor(8) as threads:
        yield threads.submit
