"""A wrong lowering does not pass the tests of operators; ``make mutations`` tries all of them."""

from __future__ import annotations

import zlib

import pytest

from tests.exporters.lowering.mutation_checks import ENDING, EQUIVALENT, is_refused
from tests.exporters.lowering.mutations import MODULES, WrongLowering, wrong_lowerings

TRIED = 200


def chosen() -> list[WrongLowering]:
    """Choose what is tried here, by its words alone; every module has some of it."""
    found = {repr(wrong): wrong for wrong in wrong_lowerings()}
    names = [name for name in found if name not in EQUIVALENT and not name.startswith(ENDING)]
    names.sort(key=lambda name: zlib.crc32(name.encode()))
    return [found[name] for name in names[:TRIED]]


@pytest.mark.timeout(1200)
def test_two_hundred_wrong_lowerings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = chosen()
    assert len(tried) == TRIED
    assert {wrong.module for wrong in tried} | {"loops"} == set(MODULES)
    passed = []
    for wrong in tried:
        with monkeypatch.context() as patch:
            if not is_refused(wrong, patch):
                passed.append(wrong)
    assert passed == []


def test_every_change_that_is_called_equivalent_exists() -> None:
    assert EQUIVALENT - {repr(wrong) for wrong in wrong_lowerings()} == set()
