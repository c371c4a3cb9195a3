"""The cores that this process may really use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from modelport.gateway.settings import usable_cores


def machine(monkeypatch: pytest.MonkeyPatch, affinity: int, quota: str | None) -> None:
    real = Path.read_text

    def read(path: Path, *args: str, **kwargs: str) -> str:
        if str(path) != "/sys/fs/cgroup/cpu.max":
            return real(path, *args, **kwargs)
        if quota is None:
            raise FileNotFoundError(path)
        return quota

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    monkeypatch.setattr(Path, "read_text", read)


@pytest.mark.parametrize(
    ("affinity", "quota", "cores"),
    [
        (8, None, 8),
        (8, "max 100000\n", 8),
        (8, "200000 100000\n", 2),
        (8, "150000 100000\n", 2),
        (8, "50000 100000\n", 1),
        (1, "400000 100000\n", 1),
        (8, "nonsense", 8),
        (8, "", 8),
        (8, "a b", 8),
    ],
)
def test_cores_are_the_affinity_capped_by_the_quota_rounded_up(
    monkeypatch: pytest.MonkeyPatch, affinity: int, quota: str | None, cores: int
) -> None:
    machine(monkeypatch, affinity, quota)
    assert usable_cores() == cores


def test_without_affinity_the_machines_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 8, None)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert usable_cores() == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_a_process_pinned_to_one_core_has_one() -> None:
    core = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{core}}}); "
        "from modelport.gateway.settings import usable_cores; print(usable_cores())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "1"
