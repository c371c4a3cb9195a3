from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.probes import ChangingRepository


@pytest.fixture
def repository(tmp_path: Path) -> ChangingRepository:
    root = tmp_path / "repository"
    root.mkdir()
    return ChangingRepository(root)
