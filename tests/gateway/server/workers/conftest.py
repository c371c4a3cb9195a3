from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.probes import Repository


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    root = tmp_path / "repository"
    root.mkdir()
    return Repository(root)
