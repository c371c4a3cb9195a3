"""The table of decompositions: an operator of ATen → a function of PyTorch that computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Decomposition = Callable[..., Any]
F = TypeVar("F", bound=Decomposition)

DECOMPOSITIONS: dict[Any, Decomposition] = {}

#: Operators that TFLite's built-in ones lack; TensorFlow and ONNX have them.
BUILT_IN: dict[Any, Decomposition] = {}

#: Operators of complex tensors, which return NotImplemented for others. TensorFlow has all of them,
#: ONNX some.
COMPLEX: dict[Any, Decomposition] = {}


def decomposes(
    *operators: Any, table: dict[Any, Decomposition] = DECOMPOSITIONS
) -> Callable[[F], F]:
    """Register the decorated function as the decomposition of ``operators``."""

    def register(function: F) -> F:
        for operator in operators:
            if operator in table:
                raise ValueError(f"operator '{operator}' is decomposed twice")
            table[operator] = function
        return function

    return register
