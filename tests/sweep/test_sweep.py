"""A tenth of the sweep, each architecture to one format; `make sweep` runs it whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sweep import attempts
from tests.sweep.attempts import ExportVerdict
from tests.sweep.catalogue import TENTH

#: What is refused in this tenth, with a reason.
REFUSED: frozenset[tuple[str, str]] = frozenset()


@pytest.mark.timeout(600)
def test_a_tenth_of_the_architectures_is_published_and_right(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "tests.sweep", "--tenth", "--jobs", "1"]
    done = subprocess.run(
        [*command, "--results", str(results)], capture_output=True, text=True, check=False
    )
    found = attempts.read(results)
    assert found.keys() == set(TENTH.items()), done.stderr
    assert {name for name, row in found.items() if row.verdict is ExportVerdict.REFUSED} == REFUSED
    assert done.returncode == 0, done.stdout
