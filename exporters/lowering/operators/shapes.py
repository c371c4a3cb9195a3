"""Views, copies, joins and parts of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelport.exporters.lowering.built_in import only_built_in
from modelport.exporters.lowering.datatypes import cast, promoted, result_type, tf_dtype
from modelport.exporters.lowering.operators import layout
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.lowering.sizes import (
    UNBOUNDED,
    Size,
    axes,
    axis,
    is_static,
    product,
    rank,
    scalar,
    shape,
    size,
    sizes,
    static_shape,
)
from modelport.exporters.runtime.tensorflow_runtime import tf


@lowers("view", "reshape", "_unsafe_view")
def view(x: Any, dims: Sequence[Size]) -> Any:
    return layout.reshape(x, dims)


@lowers("view.dtype")
def view_dtype(x: Any, dtype: Any) -> Any:
    return tf.bitcast(x, tf_dtype(dtype))


@lowers("permute")
def permute(x: Any, dims: Sequence[int]) -> Any:
    return layout.transpose(x, [axis(x, dim) for dim in dims])


@lowers("transpose.int")
def transpose(x: Any, dim0: int, dim1: int) -> Any:
    order = list(range(rank(x)))
    if order:
        dim0, dim1 = axis(x, dim0), axis(x, dim1)
        order[dim0], order[dim1] = dim1, dim0
    return permute(x, order)


@lowers("t")
def t(x: Any) -> Any:
    return permute(x, range(rank(x))[::-1])


@lowers("unsqueeze")
def unsqueeze(x: Any, dim: int) -> Any:
    return tf.expand_dims(x, axis(x, dim, extra=1))


@lowers("squeeze.dim", "squeeze.dims", "squeeze")
def squeeze(x: Any, dims: int | Sequence[int] | None = None) -> Any:
    if isinstance(dims, list | tuple) and not dims:
        return x
    single = [dim for dim in axes(x, dims) if rank(x) and x.shape[dim] == 1]
    if not single:
        return x
    kept = [each for dim, each in enumerate(sizes(x)) if dim not in single]
    if sum(not isinstance(each, int) for each in kept) <= 1:
        return layout.reshape(x, kept)
    return x[tuple(0 if dim in single else slice(None) for dim in range(rank(x)))]


@lowers("expand")
def expand(x: Any, dims: Sequence[Size], implicit: bool = False) -> Any:
    added = len(dims) - rank(x)
    kept = [i >= added and _is_kept(x, i - added, each) for i, each in enumerate(dims)]
    if all(kept):
        return x
    own = [
        size(x, i - added) if keep else each
        for i, (keep, each) in enumerate(zip(kept, dims, strict=True))
    ]
    if is_static(own) and is_static(sizes(x)) and product(own) == product(sizes(x)):
        return tf.reshape(x, own)
    result = tf.broadcast_to(x, shape(own))
    result.set_shape(static_shape(own))
    return result


def _is_kept(x: Any, dim: int, wanted: Size) -> bool:
    return isinstance(wanted, int) and (wanted == -1 or wanted == x.shape[dim])


@lowers("repeat")
def repeat(x: Any, repeats: Sequence[Size]) -> Any:
    added = len(repeats) - rank(x)
    if added:
        x = tf.reshape(x, shape([1] * added + sizes(x)))
    return tf.tile(x, shape(repeats))


@lowers("alias", "clone", "contiguous", "detach", "lift_fresh_copy")
def same(x: Any) -> Any:
    return x


@lowers("_to_copy")
def to_copy(x: Any, dtype: Any = None) -> Any:
    return x if dtype is None else cast(x, dtype)


@lowers("copy")
def copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    return expand(cast(source, x.dtype), sizes(x))


def _bound(value: Size | None) -> Size | None:
    return None if isinstance(value, int) and value > UNBOUNDED else value


@lowers("slice.Tensor")
def slice_(
    x: Any, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Size = 1
) -> Any:
    parts = [slice(None)] * rank(x)
    parts[axis(x, dim)] = slice(_bound(start), _bound(end), step)
    return x[tuple(parts)]


@lowers("select.int")
def select(x: Any, dim: int, index: Size) -> Any:
    # A StridedSlice that drops the dimension is fifty times slower in TensorFlow Lite.
    dim, last = axis(x, dim), size(x, dim)
    if isinstance(index, int):
        place = index if index >= 0 else last + index
    else:
        place = tf.where(index < 0, scalar(last) + scalar(index), scalar(index))
    return tf.gather(x, place, axis=dim)


@lowers("slice_scatter")
def slice_scatter(
    x: Any,
    source: Any,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> Any:
    """``x`` with a slice replaced by ``source``."""
    dim = axis(x, dim)
    length = size(x, dim)
    first = _clipped(start, length, 0)
    if step == 1:
        last = first + size(source, dim)
        parts = [slice_(x, dim, 0, first), source, slice_(x, dim, last)]
        # TFLite's delegate cannot join what is empty.
        parts = [part for part in parts if part.shape[dim] != 0] or [source]
        return parts[0] if len(parts) == 1 else tf.concat(parts, dim)
    places, last = tf.range(scalar(length)), _clipped(end, length, length)
    inside = (places >= first) & (places < last) & tf.equal((places - first) % step, 0)
    positions = tf.clip_by_value((places - first) // step, 0, scalar(size(source, dim)) - 1)
    aligned = tf.reshape(inside, [-1 if i == dim else 1 for i in range(rank(x))])
    return tf.where(aligned, tf.gather(source, positions, axis=dim), x)


def _clipped(bound: Size | None, length: Size, default: Size) -> Size:
    """A bound of a slice as a position from 0 to ``length``."""
    bound = default if bound is None or _bound(bound) is None else bound
    if isinstance(bound, int) and isinstance(length, int):
        return min(max(bound + length if bound < 0 else bound, 0), length)
    bound, length = scalar(bound), scalar(length)
    return tf.clip_by_value(tf.where(bound < 0, bound + length, bound), 0, length)


@lowers("select_scatter")
def select_scatter(x: Any, source: Any, dim: int, index: Size) -> Any:
    dim = axis(x, dim)
    return slice_scatter(x, tf.expand_dims(source, dim), dim, index)


@lowers("cat")
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    dtype = result_type(*tensors)
    # PyTorch ignores empty vectors among tensors of more dimensions.
    joined = [x for x in tensors if not (rank(x) == 1 and x.shape[0] == 0)] or tensors[:1]
    return tf.concat([cast(x, dtype) for x in joined], axis(joined[0], dim))


@lowers("stack")
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    return tf.stack(promoted(*tensors), axis(tensors[0], dim, extra=1))


@lowers("split_with_sizes")
def split_with_sizes(x: Any, lengths: Sequence[Size], dim: int = 0) -> list[Any]:
    if only_built_in() and x.dtype == tf.bool:  # TFLite splits numbers alone
        return [cast(each, tf.bool) for each in split_with_sizes(cast(x, tf.int32), lengths, dim)]
    return list(tf.split(x, shape(lengths), axis(x, dim), num=len(lengths)))


@lowers("split.Tensor")
def split(x: Any, length: int, dim: int = 0) -> Any:
    total = size(x, dim)
    if not isinstance(total, int):
        raise ValueError(f"the number of parts depends on the size of dimension {dim}")
    parts = [min(length, total - start) for start in range(0, total, length)] if length else []
    return split_with_sizes(x, parts or [total], dim)


@lowers("unbind.int")
def unbind(x: Any, dim: int = 0) -> list[Any]:
    if only_built_in() and x.dtype == tf.int64:  # TFLite unpacks smaller ones alone
        return [select(x, dim, place) for place in range(size(x, dim))]
    parts: list[Any] = tf.unstack(x, axis=axis(x, dim))
    return parts


@lowers("flip")
def flip(x: Any, dims: Sequence[int]) -> Any:
    return tf.reverse(x, axes(x, dims)) if dims else x


@lowers("roll")
def roll(x: Any, shifts: Sequence[Size], dims: Sequence[int] = ()) -> Any:
    if not dims:
        return tf.reshape(roll(tf.reshape(x, [-1]), shifts, [0]), shape(sizes(x)))
    for shift, dim in zip(shifts, dims, strict=True):
        dim, length = axis(x, dim), size(x, dim)
        if isinstance(shift, int) and isinstance(length, int):
            cut = (-shift) % length if length else 0
        else:
            cut = (-scalar(shift)) % tf.maximum(scalar(length), 1)
        # TensorFlow Lite has no kernel for Roll.
        x = tf.concat([slice_(x, dim, cut), slice_(x, dim, 0, cut)], dim)
    return x


def _triangle(x: Any, diagonal: int, lower: bool) -> Any:
    rows = tf.expand_dims(tf.range(scalar(size(x, -2))), 1)
    distance = tf.range(scalar(size(x, -1))) - rows
    kept = distance <= diagonal if lower else distance >= diagonal
    return tf.where(kept, x, tf.zeros([], x.dtype))


@lowers("tril")
def tril(x: Any, diagonal: int = 0) -> Any:
    return _triangle(x, diagonal, lower=True)


@lowers("triu")
def triu(x: Any, diagonal: int = 0) -> Any:
    return _triangle(x, diagonal, lower=False)


@lowers("diagonal")
def diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    dim1, dim2 = axis(x, dim1), axis(x, dim2)
    others = [dim for dim in range(rank(x)) if dim not in (dim1, dim2)]
    x = permute(x, [*others, dim1, dim2])
    rows, columns = size(x, -2), size(x, -1)
    x = slice_(x, -1, offset) if offset > 0 else slice_(x, -2, -offset)
    length = tf.minimum(scalar(size(x, -2)), scalar(size(x, -1)))
    if is_static((rows, columns)):
        length = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    flat = tf.reshape(x, shape([*sizes(x)[:-2], product(sizes(x)[-2:])]))
    return tf.gather(flat, tf.range(length) * (scalar(size(x, -1)) + 1), axis=-1)


@lowers("unfold")
def unfold(x: Any, dim: int, length: int, step: int) -> Any:
    """Windows of ``length`` along a dimension, as the last dimension."""
    if rank(x) == 0:
        return tf.reshape(x, [1])[:length]
    dim = axis(x, dim)
    count = (size(x, dim) - length) // step + 1
    places = tf.expand_dims(tf.range(count) * step, 1) + tf.range(length)
    windows = tf.gather(x, places, axis=dim)
    order = [i for i in range(rank(windows)) if i != dim + 1]
    return permute(windows, [*order, dim + 1])


@lowers("as_strided")
def as_strided(
    x: Any, dims: Sequence[Size], strides: Sequence[Size], offset: Size | None = None
) -> Any:
    """A view of ``x`` as contiguous memory.

    Tensors here have no strides of their own. A view of a permuted tensor gets other values than in
    PyTorch, and the proof refuses the artifact.
    """
    place: Any = scalar(0 if offset is None else offset)
    for i, (length, stride) in enumerate(zip(dims, strides, strict=True)):
        step = tf.range(scalar(length)) * scalar(stride)
        place = place + tf.reshape(step, [-1 if i == j else 1 for j in range(len(dims))])
    return tf.gather(tf.reshape(x, [-1]), place)
