"""One architecture of every kind in the sweep, to one format each; `make sweep` runs all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.sweep import attempts
from tests.sweep.attempts import ExportVerdict
from tests.sweep.catalogue import SAMPLE, catalogue

#: What is refused of these, with a reason.
REFUSED: frozenset[tuple[str, str]] = frozenset()

#: Those that take as long as all others together.
SLOW = (
    "albert:text-classification",
    "bart:text2text-generation",
    "clip:zero-shot-image-classification",
    "esm:fill-mask",
    "gemma3_text:text-generation",
    "gpt2:text-generation",
)


def test_the_sample_has_every_kind_and_every_format() -> None:
    every = catalogue()
    assert {every[name].kind for name in SAMPLE} == {row.kind for row in every.values()}
    assert set(SAMPLE.values()) == set(attempts.FORMATS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in SAMPLE if name not in SLOW], id="quick ones"),
        pytest.param(SLOW, id="slow ones", marks=pytest.mark.thorough),
    ],
)
def test_architectures_of_every_kind_are_published_and_right(
    names: Sequence[str], tmp_path: Path
) -> None:
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "tests.sweep", "--sample", "--jobs", "1", *names]
    done = subprocess.run(
        [*command, "--results", str(results)], capture_output=True, text=True, check=False
    )
    found = attempts.read(results)
    assert found.keys() == {(name, SAMPLE[name]) for name in names}, done.stderr
    assert {name for name, row in found.items() if row.verdict is ExportVerdict.REFUSED} == REFUSED
    assert done.returncode == 0, done.stdout
