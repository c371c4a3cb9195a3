"""Arithmetic of sizes and other numbers that are known only at run time."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from modelport.exporters.lowering.datatypes import cast, is_tensor
from modelport.exporters.lowering.registry import lowers, name_of
from modelport.exporters.lowering.sizes import product, sizes
from modelport.exporters.lowering.sizes import size as size_of
from modelport.exporters.runtime.tensorflow_runtime import tf

Function = Callable[..., Any]


lowers("operator.getitem")(operator.getitem)


def _common(*numbers: Any) -> list[Any]:
    """Numbers as scalars of one datatype: float32 if one is floating, else int32."""
    if all(isinstance(x, bool) or (is_tensor(x) and x.dtype == tf.bool) for x in numbers):
        return [tf.convert_to_tensor(x) for x in numbers]
    floats = (x.dtype.is_floating if is_tensor(x) else isinstance(x, float) for x in numbers)
    dtype = tf.float32 if any(floats) else tf.int32
    return [cast(x, dtype) for x in numbers]


def _register(of_numbers: Function, of_tensors: Function) -> None:
    """Register a function of Python and its equivalent for scalar tensors."""

    def compute(*numbers: Any) -> Any:
        if any(is_tensor(x) for x in numbers):
            return of_tensors(*_common(*numbers))
        return of_numbers(*numbers)

    lowers(name_of(of_numbers))(compute)


def _divided(x: Any, other: Any) -> Any:
    return tf.cast(x, tf.float32) / tf.cast(other, tf.float32)


def _rounded(function: Function) -> Function:
    """A rounding to an integer."""
    return lambda x: tf.cast(function(x), tf.int32) if x.dtype.is_floating else x


_register(operator.add, tf.add)
_register(operator.sub, tf.subtract)
_register(operator.mul, tf.multiply)
_register(operator.floordiv, tf.math.floordiv)
_register(operator.truediv, _divided)
_register(operator.mod, tf.math.floormod)
_register(operator.pow, tf.pow)
_register(operator.neg, tf.negative)
_register(operator.abs, tf.abs)
_register(operator.eq, tf.equal)
_register(operator.ne, tf.not_equal)
_register(operator.lt, tf.less)
_register(operator.le, tf.less_equal)
_register(operator.gt, tf.greater)
_register(operator.ge, tf.greater_equal)
_register(operator.and_, tf.logical_and)
_register(operator.or_, tf.logical_or)
_register(torch.sym_max, tf.maximum)
_register(torch.sym_min, tf.minimum)
_register(torch.sym_not, tf.logical_not)
_register(math.floor, _rounded(tf.floor))
_register(math.ceil, _rounded(tf.math.ceil))
_register(math.trunc, _rounded(lambda x: x))
_register(torch.sym_int, _rounded(lambda x: x))
_register(torch.sym_float, lambda x: tf.cast(x, tf.float32))


@lowers("torch.sym_ite")
def sym_ite(condition: Any, chosen: Any, other: Any) -> Any:
    if not is_tensor(condition):
        return chosen if condition else other
    return tf.where(condition, *_common(chosen, other))


@lowers("torch.sym_sum")
def sym_sum(numbers: Any) -> Any:
    static = sum(x for x in numbers if not is_tensor(x))
    symbolic = [x for x in numbers if is_tensor(x)]
    return tf.add_n(symbolic) + static if symbolic else static


@lowers("sym_size.int")
def sym_size(x: Any, dim: int) -> Any:
    return size_of(x, dim)


@lowers("sym_numel")
def sym_numel(x: Any) -> Any:
    return product(sizes(x))


@lowers("item", "_local_scalar_dense")
def item(x: Any) -> Any:
    """The only element, as a number: integers become sizes."""
    x = tf.reshape(x, [])
    return tf.cast(x, tf.int32) if x.dtype.is_integer else x
