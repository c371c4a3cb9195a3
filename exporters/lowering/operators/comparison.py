"""Comparisons, logic, and choice by a condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelport.exporters.lowering.datatypes import cast, promoted
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.runtime.tensorflow_runtime import tf

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": tf.equal,
    "ne": tf.not_equal,
    "lt": tf.less,
    "le": tf.less_equal,
    "gt": tf.greater,
    "ge": tf.greater_equal,
}


def _register_comparison(name: str, function: Callable[[Any, Any], Any]) -> None:
    @lowers(f"{name}.Tensor", f"{name}.Scalar")
    def compare(x: Any, other: Any) -> Any:
        x, other = promoted(x, other)
        if x.dtype == tf.bool:  # which TensorFlow does not order
            x, other = tf.cast(x, tf.int32), tf.cast(other, tf.int32)
        return function(x, other)


for _name, _function in _COMPARISONS.items():
    _register_comparison(_name, _function)


@lowers("logical_and")
def logical_and(x: Any, other: Any) -> Any:
    return tf.logical_and(cast(x, tf.bool), cast(other, tf.bool))


@lowers("logical_or")
def logical_or(x: Any, other: Any) -> Any:
    return tf.logical_or(cast(x, tf.bool), cast(other, tf.bool))


@lowers("logical_xor")
def logical_xor(x: Any, other: Any) -> Any:
    return tf.not_equal(cast(x, tf.bool), cast(other, tf.bool))


@lowers("logical_not")
def logical_not(x: Any) -> Any:
    return tf.logical_not(cast(x, tf.bool))


@lowers("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(condition: Any, x: Any, other: Any) -> Any:
    return tf.where(cast(condition, tf.bool), *promoted(x, other))


@lowers("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return tf.where(mask, cast(value, x.dtype), x)


@lowers("isnan")
def isnan(x: Any) -> Any:
    return tf.math.is_nan(x) if x.dtype.is_floating else tf.zeros_like(x, tf.bool)


@lowers("isinf")
def isinf(x: Any) -> Any:
    # TensorFlow Lite has no kernel for IsInf.
    infinity = float("inf")
    return tf.equal(tf.abs(x), infinity) if x.dtype.is_floating else tf.zeros_like(x, tf.bool)


@lowers("isfinite")
def isfinite(x: Any) -> Any:
    # The difference is NaN for infinities and NaN, and 0 for all other numbers.
    return tf.equal(x - x, 0) if x.dtype.is_floating else tf.ones_like(x, tf.bool)
