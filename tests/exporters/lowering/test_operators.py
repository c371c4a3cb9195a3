"""Every operator of the table computes what PyTorch computes."""

from __future__ import annotations

import zlib

import pytest
import torch

from modelport.exporters.lowering.built_in import built_in_operators
from modelport.exporters.lowering.operators import OPERATORS
from modelport.gateway.errors import Unsupported
from tests.exporters.lowering.layer_calls import REFUSED
from tests.exporters.lowering.oracle import (
    DynamicRun,
    OperatorCall,
    eager_difference,
    recorded_calls,
)
from tests.exporters.lowering.own_calls import (
    OWN_CALLS,
    OWN_ONLY,
    STATIC_DIMS,
    SYMBOLIC,
    TESTED_ELSEWHERE,
)
from tests.thorough import sampled

#: Calls that are traced with unknown sizes.
TRACED = 2


def calls(name: str):  # type: ignore[no-untyped-def]
    recorded = () if name in OWN_ONLY else recorded_calls().get(name, ())
    return [*recorded, *OWN_CALLS.get(name, ())]


#: Functions of numbers and ATen's operators; the others take sub-graphs.
NAMES = sorted(
    name
    for name in OPERATORS.keys() - TESTED_ELSEWHERE
    if name.startswith(("operator.", "torch.", "math."))
    or hasattr(torch.ops.aten, name.partition(".")[0])
)


#: The operators that the default suite traces; which ones depends on their names alone.
QUICK = [name for name in NAMES if zlib.crc32(name.encode()) % 4 == 0]


#: Operators of integers that TFLite has no kernel for.
INTEGERS = (
    *("bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor", "bitwise_not"),
    *("bitwise_left_shift.Tensor_Scalar", "bitwise_right_shift.Tensor_Scalar", "bmm", "mm"),
    *("div.Tensor_mode", "floor_divide", "fmod.Tensor", "pow.Tensor_Tensor", "remainder.Tensor"),
)


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_computes_what_torch_computes(name: str) -> None:
    assert calls(name), f"no sample calls {name}; add a call to OWN_CALLS"
    assert [found for call in calls(name) if (found := eager_difference(call))] == []


@pytest.mark.parametrize("name", sampled(NAMES, *QUICK))
def test_an_operator_needs_no_static_sizes(name: str) -> None:
    static = STATIC_DIMS.get(name, {})
    found = most_dimensions(calls(name))
    for symbolic in (1, 9) if name in SYMBOLIC else (0,):
        assert DynamicRun(found, static, symbolic).differences() == []


@pytest.mark.parametrize("name", INTEGERS)
def test_an_operator_of_integers_computes_the_same_with_built_in_operators(name: str) -> None:
    with built_in_operators():
        assert [found for call in calls(name) if (found := eager_difference(call))] == []


def most_dimensions(found: list[OperatorCall]) -> list[OperatorCall]:
    """The calls that say most about sizes."""
    return sorted(found, key=lambda call: -largest_rank(call))[:TRACED]


def largest_rank(call) -> int:  # type: ignore[no-untyped-def]
    leaves = torch.utils._pytree.tree_leaves((call.args, dict(call.kwargs)))
    return max((x.ndim for x in leaves if isinstance(x, torch.Tensor)), default=0)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_operator_that_tensorflow_cannot_compute_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(Unsupported, match="; "):
        OPERATORS[name]()
