"""A wrong lowering does not pass the tests of operators; ``make mutations`` tries all of them."""

from __future__ import annotations

import zlib

import pytest

from tests.exporters.lowering.mutation_checks import ENDING, EQUIVALENT, is_refused
from tests.exporters.lowering.mutations import MODULES, WrongLowering, wrong_lowerings

#: One of so many is tried here. Which ones depends on their words alone, not on other code.
SHARE = 4


def is_tried(wrong: WrongLowering) -> bool:
    name = repr(wrong)
    chosen = zlib.crc32(name.encode()) % SHARE == 0
    return chosen and name not in EQUIVALENT and not name.startswith(ENDING)


@pytest.mark.timeout(1200)
def test_two_hundred_wrong_lowerings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = [wrong for wrong in wrong_lowerings() if is_tried(wrong)]
    assert len(tried) >= 200
    assert {wrong.module for wrong in tried} | {"loops"} == set(MODULES)
    passed = []
    for wrong in tried:
        with monkeypatch.context() as patch:
            if not is_refused(wrong, patch):
                passed.append(wrong)
    assert passed == []


def test_every_change_that_is_called_equivalent_exists() -> None:
    assert EQUIVALENT - {repr(wrong) for wrong in wrong_lowerings()} == set()
