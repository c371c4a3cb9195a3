"""Settings of every test: none depends on the CI system that runs it, nor on how long it takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from modelport.exporters import progress
from modelport.gateway.repository import trial

os.environ.pop("GITHUB_ACTIONS", None)  # errors would be annotated as well
progress.LINE_SECONDS = 3600.0

#: Each trial is a process that imports torch, and most tests are not about it.
_run = trial.run
pytest.MonkeyPatch().setattr(trial, "run", lambda *_, **__: None)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Trial loads take place, as outside of tests; the result is the folder of what passed."""
    monkeypatch.setattr(trial, "run", _run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "modelport" / "trials"
