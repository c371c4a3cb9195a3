"""Sorting, selection and cumulative operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelport.exporters.lowering.datatypes import cast
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.lowering.sizes import (
    Size,
    axis,
    rank,
    shape,
    size,
    sizes,
)
from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.gateway.errors import Unsupported


def _moved_last(x: Any, dim: int) -> tuple[Any, list[int]]:
    """``x`` with ``dim`` as its last dimension, and the order that moves it back."""
    dim = axis(x, dim)
    order = [*(d for d in range(rank(x)) if d != dim), dim]
    back = [order.index(d) for d in range(rank(x))]
    return _moved_back(x, order), back


def _moved_back(x: Any, order: list[int]) -> Any:
    return x if order == sorted(order) else tf.transpose(x, order)


def _descending(x: Any) -> Any:
    """Numbers in the opposite order; the lowest integer has no negative."""
    return -x if x.dtype.is_floating else -1 - x


def _sortable(x: Any) -> Any:
    return tf.cast(x, tf.int32) if x.dtype in (tf.bool, tf.uint8) else x


def _top(x: Any, count: Size, dim: int, largest: bool) -> tuple[Any, Any]:
    """The ``count`` largest or smallest elements; the first of equal ones comes first."""
    if rank(x) == 0:
        return x, tf.zeros([], tf.int64)
    moved, back = _moved_last(_sortable(x), dim)
    values, places = tf.math.top_k(moved if largest else _descending(moved), count)
    values = cast(values if largest else _descending(values), x.dtype)
    return _moved_back(values, back), tf.cast(_moved_back(places, back), tf.int64)


@lowers("topk")
def topk(
    x: Any, k: Size, dim: int = -1, largest: bool = True, is_sorted: bool = True
) -> tuple[Any, Any]:
    return _top(x, k, dim, largest)


@lowers("sort")
def sort(x: Any, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    return _top(x, size(x, dim), dim, descending)


@lowers("sort.stable")
def sort_stably(
    x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Any, Any]:
    return _top(x, size(x, dim), dim, descending)


@lowers("argsort")
def argsort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    return sort(x, dim, descending)[1]


@lowers("argsort.stable")
def argsort_stably(
    x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Any:
    return sort(x, dim, descending)[1]


@lowers("msort")
def msort(x: Any) -> Any:
    return sort(x, 0)[0]


@lowers("kthvalue")
def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    values, places = _top(x, k, dim, largest=False)
    return _last_along(values, dim, keepdim), _last_along(places, dim, keepdim)


@lowers("median.dim")
def median_along(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """The lower of two middle elements, as PyTorch defines it."""
    values, places = _top(x, (size(x, dim) + 1) // 2, dim, largest=False)
    return _last_along(values, dim, keepdim), _last_along(places, dim, keepdim)


@lowers("median")
def median(x: Any) -> Any:
    return median_along(tf.reshape(x, [-1]), 0)[0]


def _last_along(x: Any, dim: int, keepdim: bool) -> Any:
    if rank(x) == 0:
        return x
    dim = axis(x, dim)
    last = tf.gather(x, size(x, dim) - 1, axis=dim)
    return tf.expand_dims(last, dim) if keepdim else last


@lowers("argmax")
def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _first_extreme(x, dim, keepdim, tf.reduce_max, tf.argmax)


@lowers("argmin")
def argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _first_extreme(x, dim, keepdim, tf.reduce_min, tf.argmin)


def _first_extreme(
    x: Any,
    dim: int | None,
    keepdim: bool,
    reduce: Callable[..., Any],
    compute: Callable[..., Any],
) -> Any:
    """The index of the first extreme element along ``dim``, or of the flat tensor."""
    total = rank(x)
    if dim is None or total == 0:
        flat = _first_extreme(tf.reshape(x, [-1]), 0, False, reduce, compute) if total else None
        index = tf.zeros([], tf.int64) if flat is None else flat
        return tf.reshape(index, [1] * total) if keepdim else index
    dim = axis(x, dim)
    x = _sortable(x)
    if x.dtype in (tf.int64, tf.int16, tf.float64):  # not among those of TFLite's ARG_MAX
        extreme = tf.equal(x, reduce(x, dim, keepdims=True))
        index = tf.argmax(tf.cast(extreme, tf.int32), dim)
    else:
        index = compute(x, dim)
    return tf.expand_dims(index, dim) if keepdim else index


@lowers("max.dim")
def max_along(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    return _extreme(x, dim, keepdim, tf.reduce_max, tf.reduce_any), argmax(x, dim, keepdim)


@lowers("min.dim")
def min_along(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    return _extreme(x, dim, keepdim, tf.reduce_min, tf.reduce_all), argmin(x, dim, keepdim)


def _extreme(
    x: Any, dim: int, keepdim: bool, reduce: Callable[..., Any], of_bools: Callable[..., Any]
) -> Any:
    if rank(x) == 0:
        return x
    return (of_bools if x.dtype == tf.bool else reduce)(x, axis(x, dim), keepdims=keepdim)


@lowers("cumsum")
def cumsum(x: Any, dim: int, *, dtype: Any = None) -> Any:
    x = _summable(x, dtype)
    return tf.cumsum(x, axis(x, dim)) if rank(x) else x


def _summable(x: Any, dtype: Any) -> Any:
    if dtype is not None:
        return cast(x, dtype)
    return cast(x, tf.int64) if x.dtype == tf.bool or x.dtype.is_integer else x


Combine = Callable[[list[Any], list[Any]], list[Any]]


def scan(combine: Combine, values: list[Any], dim: int) -> list[Any]:
    """All prefixes of an associative operator over several tensors, in log2(size) steps.

    ``combine`` takes the earlier and the later part.
    """
    length = size(values[0], dim)

    def step(reach: Any, parts: list[Any]) -> list[Any]:
        """Combine each element with the one ``reach`` before it, if there is one."""
        place = tf.range(length)
        before = [tf.gather(x, tf.maximum(place - reach, 0), axis=dim) for x in parts]
        reached = tf.reshape(place >= reach, [-1 if d == dim else 1 for d in range(rank(parts[0]))])
        after = combine(before, parts)
        return [tf.where(reached, new, old) for new, old in zip(after, parts, strict=True)]

    if isinstance(length, int):
        reach = 1
        while reach < length:
            values = step(reach, values)
            reach *= 2
        return values
    _, *result = tf.while_loop(
        lambda reach, *_: reach < length,
        lambda reach, *parts: [reach * 2, *step(reach, list(parts))],
        [tf.constant(1), *values],
        shape_invariants=[tf.TensorShape([]), *(x.shape for x in values)],
    )
    return list(result)


@lowers("cumprod")
def cumprod(x: Any, dim: int, *, dtype: Any = None) -> Any:
    x = _summable(x, dtype)
    if rank(x) == 0:
        return x
    return scan(lambda a, b: [a[0] * b[0]], [x], axis(x, dim))[0]


@lowers("logcumsumexp")
def logcumsumexp(x: Any, dim: int) -> Any:
    def combine(earlier: list[Any], later: list[Any]) -> list[Any]:
        high = tf.maximum(earlier[0], later[0])
        low = tf.minimum(earlier[0], later[0])
        apart = tf.where(tf.equal(high, low), tf.zeros([], x.dtype), low - high)
        return [high + tf.math.log1p(tf.exp(apart))]

    return scan(combine, [x], axis(x, dim))[0] if rank(x) else x


def _running_extreme(x: Any, dim: int, replaces: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """The running extreme and the index of its last occurrence so far."""
    if rank(x) == 0:
        return x, tf.zeros([], tf.int64)
    dim = axis(x, dim)
    along = tf.reshape(tf.range(size(x, dim)), [-1 if d == dim else 1 for d in range(rank(x))])
    places = tf.broadcast_to(along, shape(sizes(x)))

    def combine(earlier: list[Any], later: list[Any]) -> list[Any]:
        newer = replaces(later[0], earlier[0])
        return [tf.where(newer, b, a) for a, b in zip(earlier, later, strict=True)]

    values, index = scan(combine, [_sortable(x), places], dim)
    return cast(values, x.dtype), tf.cast(index, tf.int64)


@lowers("cummax")
def cummax(x: Any, dim: int) -> tuple[Any, Any]:
    return _running_extreme(x, dim, tf.greater_equal)


@lowers("cummin")
def cummin(x: Any, dim: int) -> tuple[Any, Any]:
    return _running_extreme(x, dim, tf.less_equal)


@lowers("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    sorted_sequence: Any,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """The number of elements of a row that come before each of ``x``."""
    if sorter is not None:
        sorted_sequence = tf.gather(sorted_sequence, sorter, axis=-1, batch_dims=rank(sorter) - 1)
    x = cast(x, sorted_sequence.dtype)
    columns = sorted_sequence
    if rank(sorted_sequence) > 1:
        columns = tf.expand_dims(sorted_sequence, -2)
    compare = tf.less_equal if right or side == "right" else tf.less
    before = compare(columns, tf.expand_dims(x, -1))
    count = tf.reduce_sum(tf.cast(before, tf.int32), -1)
    return count if out_int32 else tf.cast(count, tf.int64)


@lowers("bucketize.Tensor", "bucketize.Scalar")
def bucketize(x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    common = tf.float64 if boundaries.dtype.is_floating or _is_floating(x) else tf.int64
    if boundaries.dtype == getattr(x, "dtype", None):
        common = boundaries.dtype
    return searchsorted(cast(boundaries, common), cast(x, common), out_int32=out_int32, right=right)


def _is_floating(x: Any) -> bool:
    return bool(x.dtype.is_floating) if tf.is_tensor(x) else isinstance(x, float)


@lowers("unique_consecutive", "_unique2", "unique_dim")
def unique(*arguments: Any, **keywords: Any) -> Any:
    raise Unsupported("the size of its result depends on the values; TensorFlow needs it earlier")


@lowers("bincount")
def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
    count = tf.maximum(tf.cast(tf.reduce_max(x), tf.int32) + 1, minlength)
    ones = tf.ones_like(x, tf.int64) if weights is None else weights
    return tf.scatter_nd(tf.cast(x, tf.int32)[:, tf.newaxis], ones, tf.reshape(count, [1]))
