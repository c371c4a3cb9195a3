"""Writing by index: scatter, index_put and their reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from modelport.exporters.lowering.datatypes import cast, is_tensor
from modelport.exporters.lowering.operators.indexing import (
    Index,
    broadcast_mask,
    flat_index,
    from_front,
    leading_part,
    unmasked,
    window_places,
)
from modelport.exporters.lowering.operators.layout import reshape
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.lowering.sizes import (
    Size,
    axis,
    product,
    rank,
    shape,
    size,
    sizes,
)
from modelport.exporters.runtime.tensorflow_runtime import tf


def put_rows(x: Any, where: Any, rows: Any) -> Any:
    """``x`` with ``rows`` in place of its rows ``where``; the last of equal indices wins.

    TensorFlow leaves open which one does, and TFLite adds them up.
    """
    count = size(x, 0)
    turn = tf.math.unsorted_segment_max(tf.range(tf.shape(where)[0]), where, count)
    written = tf.reshape(turn >= 0, [-1] + [1] * (rank(x) - 1))
    if not where.shape[0]:  # there may be none to take
        rows = tf.concat([rows, x[:1]], 0)
    return tf.where(written, tf.gather(rows, tf.maximum(turn, 0)), x)


def add_rows(x: Any, where: Any, rows: Any) -> Any:
    """``x`` with ``rows`` added to its rows ``where``."""
    if x.dtype == tf.bool:
        return tf.logical_or(x, add_rows(cast(x, tf.int32), where, cast(rows, tf.int32)) > 0)
    return x + tf.scatter_nd(where[:, tf.newaxis], rows, tf.shape(x))


def reduce_rows(x: Any, where: Any, rows: Any, reduce: str, include_self: bool) -> Any:
    """``x`` with its rows ``where`` replaced by a reduction of ``rows``, and of itself."""
    if x.dtype == tf.bool:
        numbers = cast(x, tf.int32), where, cast(rows, tf.int32)
        return cast(reduce_rows(*numbers, reduce, include_self), tf.bool)
    count = size(x, 0)
    hits = tf.scatter_nd(where[:, tf.newaxis], tf.ones_like(where), shape([count]))
    hits = tf.reshape(hits, [-1] + [1] * (rank(x) - 1))
    if reduce in ("sum", "add", "mean"):
        kept = x if include_self else tf.where(hits > 0, tf.zeros([], x.dtype), x)
        total = add_rows(kept, where, rows)
        if reduce != "mean":
            return total
        number = tf.cast(tf.maximum(hits + int(include_self), 1), x.dtype)
        return total / number if x.dtype.is_floating else tf.math.floordiv(total, number)
    segments, combine = _SEGMENTS[reduce]
    found = segments(rows, where, count)
    found = combine(x, found) if include_self else found
    return tf.where(hits > 0, found, x)


_SEGMENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "prod": (tf.math.unsorted_segment_prod, tf.multiply),
    "multiply": (tf.math.unsorted_segment_prod, tf.multiply),
    "amax": (tf.math.unsorted_segment_max, tf.maximum),
    "amin": (tf.math.unsorted_segment_min, tf.minimum),
}


def _elementwise(x: Any, dim: int, index: Any, source: Any) -> tuple[Any, Any, Any]:
    """``x``, the indices and ``source`` of a scatter along ``dim``, all flat."""
    if rank(x) == 0:
        return tf.reshape(x, [1]), tf.reshape(tf.cast(index, tf.int32), [-1]), source
    dim = axis(x, dim)
    place: Any = 0
    for d in range(rank(x)):
        if d == dim:
            along = from_front(index, size(x, d))
        else:
            along = tf.range(size(index, d))
            along = tf.reshape(along, [-1 if e == d else 1 for e in range(rank(x))])
        place = place * size(x, d) + along
    if is_tensor(source) and rank(source):
        source = leading_part(source, index, -1)
    return tf.reshape(x, [-1]), tf.reshape(place, [-1]), source


def _values(source: Any, like: Any, where: Any) -> Any:
    """``source``, a flat tensor or a number for all, in the datatype of ``like``."""
    source = cast(source, like.dtype)
    if rank(source) == 0:
        return tf.fill(tf.shape(where), source)
    return tf.reshape(source, [-1])


def _scatter(x: Any, dim: int, index: Any, source: Any, compute: Callable[..., Any]) -> Any:
    index = tf.reshape(index, [1]) if rank(index) == 0 and rank(x) else index
    flat, where, source = _elementwise(x, dim, index, source)
    return reshape(compute(flat, where, _values(source, x, where)), sizes(x))


@lowers("scatter.src", "scatter.value")
def scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    return _scatter(x, dim, index, source, put_rows)


@lowers("scatter.reduce", "scatter.value_reduce")
def scatter_with_reduction(x: Any, dim: int, index: Any, source: Any, *, reduce: str) -> Any:
    return scatter_reduce(x, dim, index, source, reduce)


@lowers("scatter_add")
def scatter_add(x: Any, dim: int, index: Any, src: Any) -> Any:
    return _scatter(x, dim, index, src, add_rows)


@lowers("scatter_reduce.two")
def scatter_reduce(
    x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    def compute(flat: Any, where: Any, values: Any) -> Any:
        return reduce_rows(flat, where, values, reduce, include_self)

    return _scatter(x, dim, index, src, compute)


@lowers("index_put", "_unsafe_index_put")
def index_put(x: Any, indices: Sequence[Index], values: Any, accumulate: bool = False) -> Any:
    """Write ``values`` at ``indices``, which are to the axes of ``x`` as in advanced indexing."""
    masks = [index for index in indices if index is not None and index.dtype == tf.bool]
    if len(masks) == 1 and len(indices) == 1 and rank(values) == 0 and not accumulate:
        mask = reshape(masks[0], [*sizes(masks[0]), *[1] * (rank(x) - rank(masks[0]))])
        return tf.where(mask, cast(values, x.dtype), x)
    indices = unmasked(indices)
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if not dims:
        return x + cast(values, x.dtype) if accumulate else tf.broadcast_to(values, tf.shape(x))
    picked = [tf.cast(indices[dim], tf.int32) for dim in dims]
    rest = [dim for dim in range(rank(x)) if dim not in dims]
    order = [*dims, *rest]
    moved = tf.transpose(x, order) if order != list(range(rank(x))) else x
    lengths = sizes(moved)
    where = flat_index(moved, range(len(dims)), picked)
    tail = lengths[len(dims) :]
    values = cast(values, x.dtype)
    # Adjacent indices leave their axes where they were, others put them first.
    lead = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    target = [*tail[:lead], *sizes(where), *tail[lead:]]
    values = tf.broadcast_to(values, shape(target))
    n = rank(where)
    order_of_values = [*range(lead, lead + n), *range(lead), *range(lead + n, len(target))]
    values = reshape(tf.transpose(values, order_of_values), [-1, product(tail)])
    table = reshape(moved, [product(lengths[: len(dims)]), product(tail)])
    compute = add_rows if accumulate else put_rows
    result = reshape(compute(table, tf.reshape(where, [-1]), values), lengths)
    back = [order.index(dim) for dim in range(rank(x))]
    return tf.transpose(result, back) if order != list(range(rank(x))) else result


@lowers("index_add")
def index_add(x: Any, dim: int, index: Any, source: Any, *, alpha: float = 1) -> Any:
    source = source if alpha == 1 else source * cast(alpha, source.dtype)
    return _along(x, dim, index, source, add_rows)


@lowers("index_copy")
def index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    return _along(x, dim, index, source, put_rows)


@lowers("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(x: Any, dim: int, index: Any, value: Any) -> Any:
    lengths = sizes(x)
    if lengths:
        lengths[axis(x, dim)] = product(sizes(index))
    return _along(x, dim, index, tf.fill(shape(lengths), cast(value, x.dtype)), put_rows)


@lowers("index_reduce")
def index_reduce(
    x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    def compute(table: Any, where: Any, rows: Any) -> Any:
        return reduce_rows(table, where, rows, reduce, include_self)

    return _along(x, dim, index, source, compute)


def _along(x: Any, dim: int, index: Any, source: Any, compute: Callable[..., Any]) -> Any:
    """Write whole slices along ``dim``."""
    if rank(x) == 0:
        where = tf.reshape(tf.cast(index, tf.int32), [-1])
        return tf.reshape(compute(x[tf.newaxis], where, tf.reshape(source, [-1])), [])
    dim = axis(x, dim)
    order = [dim, *(d for d in range(rank(x)) if d != dim)]
    back = [order.index(d) for d in range(rank(x))]
    moved, rows = tf.transpose(x, order), tf.transpose(source, order)
    where = from_front(tf.reshape(index, [-1]), size(x, dim))
    return tf.transpose(compute(moved, where, cast(rows, x.dtype)), back)


@lowers("put")
def put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    where = from_front(tf.reshape(index, [-1]), product(sizes(x)))
    compute = add_rows if accumulate else put_rows
    return reshape(compute(tf.reshape(x, [-1]), where, tf.reshape(source, [-1])), sizes(x))


@lowers("masked_scatter")
def masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    """The elements of ``source`` in order, at the true elements of ``mask``."""
    both = tf.broadcast_dynamic_shape(tf.shape(x), tf.shape(mask))
    mask = broadcast_mask(mask, both)
    x = tf.broadcast_to(x, both)
    turn = tf.cumsum(tf.cast(tf.reshape(mask, [-1]), tf.int32), exclusive=True)
    elements = tf.concat([tf.reshape(source, [-1]), tf.zeros([1], source.dtype)], 0)
    turn = tf.minimum(turn, tf.shape(elements)[0] - 1)
    return tf.where(mask, tf.reshape(tf.gather(elements, turn), both), x)


@lowers("diagonal_scatter")
def diagonal_scatter(x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """``x`` with ``src`` on a diagonal."""
    first, second = axis(x, dim1), axis(x, dim2)
    rest = [d for d in range(rank(x)) if d not in (first, second)]
    order = [first, second, *rest]
    moved = tf.transpose(x, order)
    values = tf.transpose(src, [len(rest), *range(len(rest))])
    along = tf.range(size(src, -1))
    where = [along + max(-offset, 0), along + max(offset, 0)]
    result = index_put(moved, where, values)
    return tf.transpose(result, [order.index(d) for d in range(rank(x))])


@lowers("col2im")
def col2im(
    x: Any,
    output_size: Sequence[Size],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Any:
    """Add up overlapping windows, given as columns, into a plane."""
    if rank(x) == 2:
        plane = col2im(x[tf.newaxis], output_size, kernel_size, dilation, padding, stride)
        return tf.squeeze(plane, 0)
    down, across = (
        window_places(*each)
        for each in zip(output_size, kernel_size, dilation, padding, stride, strict=True)
    )
    height, width = (n + 2 * p for n, p in zip(output_size, padding, strict=True))
    where = down[:, tf.newaxis, :, tf.newaxis] * width + across[tf.newaxis, :, tf.newaxis, :]
    batch, rows, columns = sizes(x)
    area = kernel_size[0] * kernel_size[1]
    channels = rows // area
    elements = reshape(x, [batch * channels, area * columns])
    flat = tf.scatter_nd(
        tf.reshape(where, [-1, 1]),
        tf.transpose(elements),
        shape([height * width, batch * channels]),
    )
    plane = reshape(tf.transpose(flat), [batch, channels, height, width])
    top, left = padding
    return plane[:, :, top : height - top, left : width - left]
