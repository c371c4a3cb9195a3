"""Folders that killed processes leave."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from modelport.loadtests.system import temporary_folders

PREFIX = "modelport-test-"
HOLD = f"""
from modelport.loadtests.system import temporary_folders
with temporary_folders.folder({PREFIX!r}) as folder:
    print(folder, flush=True)
    input()
"""


def test_a_folder_is_gone_after_the_block_and_one_of_a_killed_process_when_the_next_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        (tmp_path / f"{PREFIX}young").mkdir()
        (tmp_path / f"{PREFIX}young" / temporary_folders.LOCK).touch()  # just being made
        with temporary_folders.folder(PREFIX) as mine:
            assert held.is_dir()
            assert mine.is_dir()
        assert not mine.exists()
        holder.kill()
    assert held.is_dir()
    with temporary_folders.folder(PREFIX):
        assert not held.exists()
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}young"]
