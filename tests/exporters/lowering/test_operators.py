"""Every operator of the table computes what PyTorch computes."""

from __future__ import annotations

import pytest
import torch

from modelport.exporters.lowering.operators import OPERATORS
from modelport.gateway.errors import Unsupported
from tests.exporters.lowering.layer_calls import REFUSED
from tests.exporters.lowering.oracle import DynamicRun, eager_difference, recorded_calls
from tests.exporters.lowering.own_calls import (
    OWN_CALLS,
    OWN_ONLY,
    STATIC_DIMS,
    SYMBOLIC,
    TESTED_ELSEWHERE,
)

#: Calls that are traced with unknown sizes.
TRACED = 3


def calls(name: str):  # type: ignore[no-untyped-def]
    recorded = () if name in OWN_ONLY else recorded_calls().get(name, ())
    return [*recorded, *OWN_CALLS.get(name, ())]


ATEN = sorted(
    name
    for name in OPERATORS
    if name.partition(".")[0] in dir(torch.ops.aten) and name not in TESTED_ELSEWHERE
)


@pytest.mark.parametrize("name", ATEN)
def test_an_operator_computes_what_torch_computes(name: str) -> None:
    assert calls(name), f"no sample calls {name}; add a call to OWN_CALLS"
    assert [found for call in calls(name) if (found := eager_difference(call))] == []


@pytest.mark.parametrize("name", ATEN)
def test_an_operator_needs_no_static_sizes(name: str) -> None:
    static = STATIC_DIMS.get(name, {})
    # those with the most dimensions say most
    found = sorted(calls(name), key=lambda call: -largest_rank(call))[:TRACED]
    for symbolic in (1, 9) if name in SYMBOLIC else (0,):
        assert DynamicRun(found, static, symbolic).differences() == []


def largest_rank(call) -> int:  # type: ignore[no-untyped-def]
    leaves = torch.utils._pytree.tree_leaves((call.args, dict(call.kwargs)))
    return max((x.ndim for x in leaves if isinstance(x, torch.Tensor)), default=0)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_operator_that_tensorflow_cannot_compute_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(Unsupported, match="; "):
        OPERATORS[name]()
