"""Tests of the limits on freed memory that glibc keeps, set unless the environment sets them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from modelport.gateway.runtime import malloc


@pytest.fixture(autouse=True)
def unchosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def set_options(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The calls to ``mallopt`` of a simulated C library."""
    options: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda option, value: options.append((option, value)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    return options


def test_glibc_takes_the_thresholds() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        pytest.skip("another C library")
    assert mallopt(malloc._M_MMAP_THRESHOLD, malloc.MMAP_BYTES) == 1
    assert mallopt(malloc._M_TRIM_THRESHOLD, malloc.TRIM_BYTES) == 1


def test_they_are_set(set_options: list[tuple[int, int]]) -> None:
    malloc.keep_freed_memory()
    assert len(set_options) == 2


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_"])
def test_what_somebody_chose_in_the_environment_stays(
    set_options: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "glibc.malloc.trim_threshold=131072")
    malloc.keep_freed_memory()
    assert set_options == []


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    malloc.keep_freed_memory()
