"""Products and quotients with an empty constant."""

from __future__ import annotations

import pytest

from modelport.exporters.lowering.registry import OPERATORS
from modelport.exporters.runtime.tensorflow_runtime import tf


@pytest.mark.parametrize("name", ["mul.Tensor", "div.Tensor"])
@pytest.mark.parametrize("shape", [(0, 1, 5), (0, 7, 5), (0, 1, 1)])
def test_a_product_of_no_elements_is_none_that_tensorflow_would_divide_by_zero(
    name: str, shape: tuple[int, ...]
) -> None:
    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def compute(x: tf.Tensor) -> tf.Tensor:
        return OPERATORS[name](x, tf.zeros(shape))

    function = compute.get_concrete_function(tf.TensorSpec((0, 7, 1)))
    # The optimiser's division ends the process, so that the graph is looked at before it runs.
    assert not {op.type for op in function.graph.get_operations()} & {"Mul", "RealDiv"}
    assert function(tf.zeros((0, 7, 1))).shape == (0, 7, shape[-1])


def test_a_product_of_elements_remains_one() -> None:
    assert OPERATORS["mul.Tensor"](tf.constant([2.0]), tf.constant([3.0])).numpy() == [6.0]
