"""TFLite's built-in operators: what they lack, and what its converter gets wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tensorflow.python.ops import gen_math_ops

from modelport.exporters.runtime.tensorflow_runtime import tf

_BUILT_IN_ONLY: ContextVar[bool] = ContextVar("built_in_only", default=False)

#: Operations that give a constant where their first input is one.
_PASSED_ON = ("Cast", "EnsureShape", "ExpandDims", "Identity", "Reshape", "Transpose")


def only_built_in() -> bool:
    """Whether the model is lowered for TFLite."""
    return _BUILT_IN_ONLY.get()


@contextmanager
def built_in_operators() -> Iterator[None]:
    """Lower for TFLite, whose converter swaps the operands of some operations.

    It moves a transposition from the second operand of ``constant - x`` or ``constant / x`` to the
    result, through other elementwise operations, too, and computes ``x - constant`` (TensorFlow
    2.21). So these become a sum and a product.
    """
    token = _BUILT_IN_ONLY.set(True)
    originals = {name: getattr(gen_math_ops, name) for name in ("sub", "real_div", "reciprocal")}
    gen_math_ops.sub = functools.partial(_ordered, originals["sub"], _subtracted)
    gen_math_ops.real_div = functools.partial(_ordered, originals["real_div"], _divided)
    gen_math_ops.reciprocal = _inverse
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(gen_math_ops, name, function)
        _BUILT_IN_ONLY.reset(token)


def _ordered(
    original: Callable[..., Any], rewritten: Callable[..., Any], x: Any, y: Any, name: Any = None
) -> Any:
    if _is_constant(x) and tf.is_symbolic_tensor(y) and not _is_constant(y):
        return rewritten(x, y)
    return original(x, y, name=name)


def _is_constant(x: Any) -> bool:
    """Whether ``x`` is a number or a weight, or a view of one."""
    if not tf.is_symbolic_tensor(x):
        return True
    op = x.op
    while op.type in _PASSED_ON:
        op = op.inputs[0].op
    return op.type in ("Const", "ReadVariableOp")


def _subtracted(x: Any, y: Any) -> Any:
    return gen_math_ops.add_v2(x, gen_math_ops.mul(y, tf.constant(-1, y.dtype)))


def _divided(x: Any, y: Any) -> Any:
    return gen_math_ops.mul(x, _inverse(y))


def _inverse(x: Any, name: Any = None) -> Any:
    x = tf.convert_to_tensor(x)
    return gen_math_ops._pow(x, tf.constant(-1, x.dtype))
