"""A wrong lowering does not pass the tests of operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from modelport.exporters.lowering.operators import OPERATORS
from tests.exporters.lowering.mutations import WrongLowering, wrong_lowerings
from tests.exporters.lowering.oracle import DynamicRun, OperatorCall, eager_difference
from tests.exporters.lowering.own_calls import STATIC_DIMS, TESTED_ELSEWHERE
from tests.exporters.lowering.test_operators import calls

#: Wrong lowerings that are tried, evenly spread over all there are.
TRIED = 240


#: Changes that change nothing: defaults that every call gives, and limits that are never reached.
EQUIVALENT = (
    "activations.rrelu_with_noise",
    "normalization.batch_norm_of_running_statistics +16",
    "shapes.roll +8: maximum becomes minimum",
    "shapes.diagonal +6",
    "symbolic.sym_sum",
)


def is_refused(wrong: WrongLowering, monkeypatch: pytest.MonkeyPatch) -> bool:
    lowerings = wrong.lowerings()
    names = [name for name in wrong.affected() if name not in TESTED_ELSEWHERE]
    for name in names:
        monkeypatch.setitem(OPERATORS, name, lowerings[name])
    if any(differs(eager_difference, call) for name in names for call in calls(name)):
        return True
    return any(differs(traced_differences, name) for name in names)


def traced_differences(name: str) -> Sequence[str]:
    found: list[OperatorCall] = calls(name)
    return [
        message
        for symbolic in (0, 1, 9)
        for message in DynamicRun(found, STATIC_DIMS.get(name, {}), symbolic).differences()
    ]


def differs(compare: Callable[[Any], object], subject: object) -> bool:
    try:
        return bool(compare(subject))
    except Exception:  # TensorFlow refuses what the wrong lowering asks of it
        return True


def test_two_hundred_wrong_lowerings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [each for each in wrong_lowerings() if not repr(each).startswith(EQUIVALENT)]
    tried = found[:: max(1, len(found) // TRIED)]
    assert len(tried) >= 200
    passed = []
    for wrong in tried:
        with monkeypatch.context() as patch:
            if not is_refused(wrong, patch):
                passed.append(wrong)
    assert passed == []
