"""Branches, loops, arithmetic of sizes, and layouts between layers compute what torch computes."""

from __future__ import annotations

import pytest

from modelport.exporters.lowering.operators import OPERATORS
from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.gateway.errors import Unsupported
from tests.exporters.lowering.programs import PROGRAMS, ProgramCase


@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_a_program_computes_what_torch_computes_for_every_size(program: ProgramCase) -> None:
    assert program.differences() == []


def test_a_loop_keeps_the_datatype_of_what_it_carries() -> None:
    loop = OPERATORS["while_loop"]
    (turns,) = loop(lambda n: [n < 3], lambda n: [tf.cast(n + 1, tf.int64)], [tf.constant(0)])
    assert turns.dtype == tf.int32
    assert turns == 3


def test_a_block_under_autocast_is_refused_and_one_without_it_runs() -> None:
    wrapped = OPERATORS["wrap_with_autocast"]
    assert wrapped("cpu", None, False, None, lambda x: [x], 1) == [1]
    with pytest.raises(Unsupported, match="autocast"):
        wrapped("cpu", None, True, None, lambda x: [x], 1)
