"""Sums, extremes and other results along dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from modelport.exporters.lowering.built_in import only_built_in
from modelport.exporters.lowering.datatypes import cast, floating
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.lowering.sizes import axes, product, size
from modelport.exporters.runtime.tensorflow_runtime import tf

Dims = int | Sequence[int] | None


def _accumulated(x: Any, dtype: Any) -> Any:
    """``x`` in the datatype of a sum: integers are added as int64."""
    if dtype is not None:
        return cast(x, dtype)
    return x if x.dtype.is_floating or x.dtype.is_complex else cast(x, torch.int64)


@lowers("sum.dim_IntList")
def sum_dims(x: Any, dims: Dims = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return tf.reduce_sum(_accumulated(x, dtype), axes(x, dims), keepdims=keepdim)


@lowers("sum")
def sum_all(x: Any, dtype: Any = None) -> Any:
    return sum_dims(x, None, False, dtype)


@lowers("mean.dim")
def mean_dims(x: Any, dims: Dims = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return tf.reduce_mean(_accumulated(x, dtype), axes(x, dims), keepdims=keepdim)


@lowers("mean")
def mean_all(x: Any, dtype: Any = None) -> Any:
    return mean_dims(x, None, False, dtype)


@lowers("prod.dim_int")
def prod_dim(x: Any, dim: int, keepdim: bool = False, dtype: Any = None) -> Any:
    return tf.reduce_prod(_accumulated(x, dtype), axes(x, dim), keepdims=keepdim)


@lowers("prod")
def prod_all(x: Any, dtype: Any = None) -> Any:
    return tf.reduce_prod(_accumulated(x, dtype))


def _largest(x: Any, dims: list[int], keepdim: bool) -> Any:
    if x.dtype == tf.bool:
        return tf.reduce_any(x, dims, keepdims=keepdim)
    return _without_finite(tf.reduce_max(x, dims, keepdims=keepdim), x, -math.inf, dims, keepdim)


def _smallest(x: Any, dims: list[int], keepdim: bool) -> Any:
    if x.dtype == tf.bool:
        return tf.reduce_all(x, dims, keepdims=keepdim)
    return _without_finite(tf.reduce_min(x, dims, keepdims=keepdim), x, math.inf, dims, keepdim)


def _without_finite(extreme: Any, x: Any, last: float, dims: list[int], keepdim: bool) -> Any:
    """``extreme``, or infinity where ``x`` has no other: TFLite begins at a finite number."""
    if not only_built_in() or not x.dtype.is_floating:
        return extreme
    infinite = tf.reduce_all(tf.equal(x, last), dims, keepdims=keepdim)
    return tf.where(infinite, tf.constant(last, x.dtype), extreme)


@lowers("amax")
def amax(x: Any, dims: Dims = None, keepdim: bool = False) -> Any:
    return _largest(x, axes(x, dims), keepdim)


@lowers("amin")
def amin(x: Any, dims: Dims = None, keepdim: bool = False) -> Any:
    return _smallest(x, axes(x, dims), keepdim)


@lowers("max")
def max_all(x: Any) -> Any:
    return amax(x)


@lowers("min")
def min_all(x: Any) -> Any:
    return amin(x)


@lowers("any", "any.dim", "any.dims")
def any_(x: Any, dims: Dims = None, keepdim: bool = False) -> Any:
    return _logical(tf.reduce_any, x, dims, keepdim)


@lowers("all", "all.dim", "all.dims")
def all_(x: Any, dims: Dims = None, keepdim: bool = False) -> Any:
    return _logical(tf.reduce_all, x, dims, keepdim)


def _logical(reduce: Callable[..., Any], x: Any, dims: Dims, keepdim: bool) -> Any:
    result = reduce(cast(x, tf.bool), axes(x, dims), keepdims=keepdim)
    return tf.cast(result, tf.uint8) if x.dtype == tf.uint8 else result


def _variance(x: Any, dims: Dims, correction: float | None, keepdim: bool) -> tuple[Any, Any]:
    along = axes(x, dims)
    mean = tf.reduce_mean(x, along, keepdims=True)
    squares = tf.square(x - mean)
    correction = 1 if correction is None else correction
    if correction:
        count = cast(product(size(x, dim) for dim in along), x.dtype)
        freedom = tf.maximum(count - cast(float(correction), x.dtype), 0)
        variance = tf.reduce_sum(squares, along, keepdims=keepdim) / freedom
    else:
        variance = tf.reduce_mean(squares, along, keepdims=keepdim)
    return variance, mean if keepdim else tf.reshape(mean, tf.shape(variance))


@lowers("var.correction")
def var(x: Any, dims: Dims = None, correction: float | None = None, keepdim: bool = False) -> Any:
    return _variance(x, dims, correction, keepdim)[0]


@lowers("std.correction")
def std(x: Any, dims: Dims = None, correction: float | None = None, keepdim: bool = False) -> Any:
    return tf.sqrt(var(x, dims, correction, keepdim))


@lowers("var_mean.correction")
def var_mean(
    x: Any, dims: Dims = None, correction: float | None = None, keepdim: bool = False
) -> tuple[Any, Any]:
    return _variance(x, dims, correction, keepdim)


@lowers("logsumexp")
def logsumexp(x: Any, dims: Dims, keepdim: bool = False) -> Any:
    return tf.reduce_logsumexp(floating(x), axes(x, dims), keepdims=keepdim)


@lowers("linalg_vector_norm")
def vector_norm(
    x: Any, order: float = 2, dims: Dims = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    along = axes(x, dims)
    x = tf.abs(x if dtype is None else cast(x, dtype))
    if order == 2:
        return tf.sqrt(tf.reduce_sum(tf.square(x), along, keepdims=keepdim))
    if order == 1:
        return tf.reduce_sum(x, along, keepdims=keepdim)
    if abs(order) == float("inf"):
        reduce = tf.reduce_max if order > 0 else tf.reduce_min
        return reduce(x, along, keepdims=keepdim)
    if order == 0:
        return tf.reduce_sum(cast(x != 0, x.dtype), along, keepdims=keepdim)
    return tf.reduce_sum(x**order, along, keepdims=keepdim) ** (1 / order)
