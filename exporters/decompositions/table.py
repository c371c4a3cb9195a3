"""The table of decompositions: an operator of ATen → a function of PyTorch that computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Decomposition = Callable[..., Any]

DECOMPOSITIONS: dict[Any, Decomposition] = {}


def decomposes(*operators: Any) -> Callable[[Decomposition], Decomposition]:
    """Register the decorated function as the decomposition of ``operators``."""

    def register(function: Decomposition) -> Decomposition:
        for operator in operators:
            if operator in DECOMPOSITIONS:
                raise ValueError(f"operator '{operator}' is decomposed twice")
            DECOMPOSITIONS[operator] = function
        return function

    return register
