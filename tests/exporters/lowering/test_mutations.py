"""A wrong lowering does not pass the tests of operators; ``make mutations`` tries all of them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import pytest

from tests.exporters.lowering.mutation_checks import ENDING, EQUIVALENT, is_equivalent, is_refused
from tests.exporters.lowering.mutations import MODULES, WrongLowering, wrong_lowerings

#: One of so many is tried. Which ones depends on their words alone, not on other code.
SHARE = 4

#: Changes of these functions affect a hundred operators, or fail only once those are traced.
SLOW = (
    "convolution._same_or_valid",
    "convolution.convolution",
    "layout._below",
    "layout._order",
    "layout.channels_last_operand",
    "layout.reshape",
)


def is_tried(wrong: WrongLowering) -> bool:
    name = repr(wrong)
    chosen = zlib.crc32(name.encode()) % SHARE == 0
    return chosen and not is_equivalent(wrong) and not name.startswith(ENDING)


def is_slow(wrong: WrongLowering) -> bool:
    return f"{wrong.module}.{wrong.function}" in SLOW


def not_refused(tried: Iterable[WrongLowering]) -> list[WrongLowering]:
    passed = []
    for wrong in tried:
        with pytest.MonkeyPatch.context() as patch:
            if not is_refused(wrong, patch):
                passed.append(wrong)
    return passed


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_two_hundred_wrong_lowerings_are_refused() -> None:
    tried = [each for each in wrong_lowerings() if is_tried(each) and not is_slow(each)]
    assert len(tried) >= 200
    assert {wrong.module for wrong in tried} | {"loops"} == set(MODULES)
    assert not_refused(tried) == []


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_wrong_lowerings_that_many_operators_use_are_refused() -> None:
    tried = [each for each in wrong_lowerings() if is_tried(each) and is_slow(each)]
    assert {f"{each.module}.{each.function}" for each in tried} == set(SLOW)
    assert not_refused(tried) == []


def test_every_change_that_is_called_equivalent_exists() -> None:
    assert EQUIVALENT - {repr(wrong) for wrong in wrong_lowerings()} == set()
