"""A tenth of the sweep, each architecture to one format; `make sweep` runs it whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.sweep import attempts
from tests.sweep.attempts import ExportVerdict
from tests.sweep.catalogue import TENTH

#: What is refused in this tenth, with a reason.
REFUSED: frozenset[tuple[str, str]] = frozenset()

#: Those that take as long as all others together.
SLOW = ("albert:text-classification", "esm:fill-mask", "gpt2:text-generation")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in TENTH if name not in SLOW], id="quick ones"),
        pytest.param(SLOW, id="slow ones", marks=pytest.mark.thorough),
    ],
)
def test_a_tenth_of_the_architectures_is_published_and_right(
    names: Sequence[str], tmp_path: Path
) -> None:
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "tests.sweep", "--tenth", "--jobs", "1", *names]
    done = subprocess.run(
        [*command, "--results", str(results)], capture_output=True, text=True, check=False
    )
    found = attempts.read(results)
    assert found.keys() == {(name, TENTH[name]) for name in names}, done.stderr
    assert {name for name, row in found.items() if row.verdict is ExportVerdict.REFUSED} == REFUSED
    assert done.returncode == 0, done.stdout
