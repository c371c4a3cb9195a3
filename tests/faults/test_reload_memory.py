"""Reloads under load free what they replace: no reload keeps as much as half of a model.

``MODELPORT_RELOADS=200`` (``make soak``) is the run that the figure is taken from. The gateway has
one malloc arena: with more, each grows to the peak of a load when a load's thread first takes it,
which is 25 MiB at a time that no number of reloads foretells.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from modelport.gateway.repository import manifest
from tests import models
from tests.faults import probes
from tests.faults.ledger import parameter, recorded
from tests.faults.probes import CONFIG, EXPLICIT, ChangingRepository
from tests.faults.traffic import failures, flowing
from tests.polling import eventually
from tests.server import Gateway

RELOADS = int(os.environ.get("MODELPORT_RELOADS", "20"))
#: Memory is compared with what it was after so many reloads, ...
SETTLED = 10
#: ... each time the median after this many of them.
WINDOW = 5
FACTORS = (2.0, 3.0)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def resident_bytes(gateway: Gateway) -> int:
    pages = Path(f"/proc/{gateway.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def put(repository: ChangingRepository, factor: float) -> None:
    """Version 1, whole, in the place of the one that is there."""
    staged, place = repository.root / ".staged", repository.root / "m" / "1"
    models.weighty(staged / "model.onnx", factor)
    manifest.write(staged)
    if place.exists():
        away = repository.root / ".old"
        place.rename(away)
        staged.rename(place)
        shutil.rmtree(away)
    else:
        staged.rename(place)


@pytest.fixture(autouse=True)
def one_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")


@contextmanager
def weighty(repository: ChangingRepository, ledger: Path, extra: str = "") -> Iterator[Gateway]:
    repository.config(CONFIG.format(backend="ledger") + extra)
    put(repository, FACTORS[0])
    with recorded(repository.root, ledger, *EXPLICIT, "--load-model", "m") as (gateway, _):
        yield gateway


def reload_under_load(gateway: Gateway, repository: ChangingRepository, reloads: int) -> list[int]:
    """Resident memory after each reload; every request is answered from one version."""
    sizes = []
    with flowing(gateway, FACTORS) as traffic:
        eventually(partial(traffic.each_has, 1), "traffic flows")
        for turn in range(1, reloads + 1):
            factor = FACTORS[turn % 2]
            put(repository, factor)
            assert probes.load(gateway).status_code == 200
            assert probes.answer(gateway) == ("1", factor)
            sizes.append(resident_bytes(gateway))
    assert failures(traffic.outcomes) == []
    assert {outcome.factor for outcome in traffic.outcomes} == set(FACTORS)
    return sizes


def models_kept(repository: ChangingRepository, sizes: list[int]) -> float:
    """The growth of a reload, in models as large as their files."""
    early = statistics.median(sizes[SETTLED - WINDOW : SETTLED])
    late = statistics.median(sizes[-WINDOW:])
    print(f"RSS after {SETTLED} reloads {early / 2**20:.1f} MiB, after {len(sizes)}: "
          f"{late / 2**20:.1f} MiB")  # fmt: skip
    model = (repository.root / "m" / "1" / "model.onnx").stat().st_size
    return (late - early) / (len(sizes) - SETTLED) / model


@pytest.mark.thorough
def test_memory_after_many_reloads_is_what_it_was_after_the_first(
    repository: ChangingRepository, tmp_path: Path
) -> None:
    with weighty(repository, tmp_path / "ledger") as gateway:
        sizes = reload_under_load(gateway, repository, RELOADS)
    assert models_kept(repository, sizes) < 0.5


@pytest.mark.thorough
def test_the_check_sees_a_backend_that_keeps_what_it_loads(
    repository: ChangingRepository, tmp_path: Path
) -> None:
    with weighty(repository, tmp_path / "ledger", parameter("leak", 1)) as gateway:
        sizes = reload_under_load(gateway, repository, SETTLED + WINDOW)
    assert models_kept(repository, sizes) > 1
