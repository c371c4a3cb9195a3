"""Settings of every test: none depends on the CI system that runs it, nor on how long it takes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from modelport.exporters import progress
from modelport.gateway.repository import trial

os.environ.pop("GITHUB_ACTIONS", None)  # errors would be annotated as well
progress.LINE_SECONDS = 3600.0
# Hundreds of servers start: without compiled modules each takes a third longer.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

#: The files that take longest, longest first: started first, so that no worker ends long after the
#: others. The rest fills in.
LONG = (
    *("faults/test_shutdown.py", "faults/test_upstream.py", "faults/test_managed.py"),
    *("gateway/test_embedded.py", "loadtests/test_compare_servers.py", "faults/test_artifacts.py"),
    *("faults/test_versions.py", "faults/test_overload.py", "faults/test_readiness.py"),
    *("gateway/test_lifecycle_formats.py", "loadtests/test_run.py", "gateway/test_cli.py"),
    *("loadtests/test_gate_retrained.py", "faults/test_reload.py", "attacks/test_fuzz.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turns = {Path(__file__).parent / name: turn for turn, name in enumerate(LONG)}
    items.sort(key=lambda item: turns.get(item.path, len(LONG)))


#: Each trial is a process that imports torch, and most tests are not about it.
_run = trial.run
pytest.MonkeyPatch().setattr(trial, "run", lambda *_, **__: None)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Trial loads take place, as outside of tests; the result is the folder of what passed."""
    monkeypatch.setattr(trial, "run", _run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "modelport" / "trials"
