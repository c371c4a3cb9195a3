"""Reading by index: gather, advanced indexing, embeddings, windows, triangles and turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from modelport.exporters.lowering.datatypes import cast
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

Index = Any


def from_front(index: Any, length: Size) -> Any:
    """``index`` in int32, with negative ones counted from the end."""
    index = tf.cast(index, tf.int32)
    return tf.where(index < 0, index + length, index)


def unmasked(indices: Sequence[Index]) -> list[Index]:
    """``indices`` with each mask as the indices of its true elements."""
    result: list[Index] = []
    for index in indices:
        if index is not None and index.dtype in (tf.bool, tf.uint8):
            places = tf.cast(tf.where(index), tf.int32)
            result += tf.unstack(places, rank(index), axis=1)
        else:
            result.append(index)
    return result


def flat_index(x: Any, dims: Sequence[int], indices: Sequence[Index]) -> Any:
    """One index into the merged ``dims`` of ``x`` from broadcast indices into each."""
    result: Any = None
    for dim, index in zip(dims, indices, strict=True):
        length = size(x, dim)
        index = from_front(index, length)
        result = index if result is None else result * length + index
    return result


@lowers("index.Tensor")
def index_tensor(x: Any, indices: Sequence[Index]) -> Any:
    """Advanced indexing; axes that are indexed merge into one, which is gathered from."""
    indices = unmasked(indices)
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    picked = [indices[dim] for dim in dims]
    first = dims[0]
    if dims != list(range(first, first + len(dims))):  # their result's axes come first
        rest = [dim for dim in range(rank(x)) if dim not in dims]
        x, dims, first = tf.transpose(x, [*dims, *rest]), list(range(len(dims))), 0
    lengths = sizes(x)
    where = flat_index(x, dims, picked)
    if len(dims) > 1:
        merged = [*lengths[:first], product(lengths[d] for d in dims), *lengths[dims[-1] + 1 :]]
        x = reshape(x, merged)
    return tf.gather(x, where, axis=first)


@lowers("index_select")
def index_select(x: Any, dim: int, index: Any) -> Any:
    if rank(x) == 0:
        return tf.reshape(x, [])
    return tf.gather(x, tf.reshape(index, [-1]), axis=axis(x, dim))


@lowers("embedding")
def embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    return tf.gather(weight, indices)


@lowers("gather")
def gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    """``x[i][index[i][j][k]][k]`` for ``dim`` 1, over the part of ``x`` that ``index`` covers."""
    if rank(x) == 0 or rank(index) == 0:
        return tf.reshape(tf.gather(tf.reshape(x, [-1]), tf.cast(index, tf.int32)), tf.shape(index))
    if index.dtype not in (tf.int32, tf.int64):
        index = tf.cast(index, tf.int32)
    dim = axis(x, dim)
    x = leading_part(x, index, dim)
    order = [*(d for d in range(rank(x)) if d != dim), dim]
    if dim == rank(x) - 1:
        return tf.gather(x, index, axis=dim, batch_dims=dim)
    y = tf.gather(
        tf.transpose(x, order), tf.transpose(index, order), axis=rank(x) - 1, batch_dims=rank(x) - 1
    )
    back = list(range(rank(x) - 1))
    back.insert(dim, rank(x) - 1)
    return tf.transpose(y, back)


def leading_part(x: Any, like: Any, apart_from: int) -> Any:
    """``x`` cut to the sizes of ``like`` in every dimension but one."""
    if all(
        d == apart_from or (x.shape[d] is not None and x.shape[d] == like.shape[d])
        for d in range(rank(x))
    ):
        return x
    lengths = [size(x if d == apart_from else like, d) for d in range(rank(x))]
    return tf.slice(x, [0] * rank(x), shape(lengths))


@lowers("take_along_dim")
def take_along_dim(x: Any, indices: Any, dim: int | None = None) -> Any:
    if dim is None:
        return tf.gather(tf.reshape(x, [-1]), tf.reshape(indices, [-1]))
    dim = axis(x, dim)
    lengths = [
        tf.maximum(tf.shape(x)[d], tf.shape(indices)[d]) if d != dim else -1 for d in range(rank(x))
    ]
    wide = [size(x, d) if d == dim else n for d, n in enumerate(lengths)]
    long = [size(indices, d) if d == dim else n for d, n in enumerate(lengths)]
    return gather(tf.broadcast_to(x, shape(wide)), dim, tf.broadcast_to(indices, shape(long)))


@lowers("tril_indices")
def tril_indices(row: int, col: int, offset: int = 0, dtype: Any = torch.int64) -> Any:
    return cast(tf.constant(torch.tril_indices(row, col, offset).numpy()), dtype)


@lowers("triu_indices")
def triu_indices(row: int, col: int, offset: int = 0, dtype: Any = torch.int64) -> Any:
    return cast(tf.constant(torch.triu_indices(row, col, offset).numpy()), dtype)


@lowers("nonzero")
def nonzero(x: Any) -> Any:
    if rank(x) == 0:
        return tf.zeros([tf.cast(cast(x, tf.bool), tf.int32), 0], tf.int64)
    return tf.where(cast(x, tf.bool))


@lowers("masked_select")
def masked_select(x: Any, mask: Any) -> Any:
    both = tf.broadcast_dynamic_shape(tf.shape(x), tf.shape(mask))
    elements = tf.reshape(tf.broadcast_to(x, both), [-1])
    return tf.boolean_mask(elements, tf.reshape(broadcast_mask(mask, both), [-1]))


def broadcast_mask(mask: Any, to: Any) -> Any:
    """A mask in a larger shape; TFLite broadcasts numbers alone."""
    return tf.cast(tf.broadcast_to(tf.cast(mask, tf.int32), to), tf.bool)


@lowers("one_hot")
def one_hot(x: Any, num_classes: int = -1) -> Any:
    if isinstance(num_classes, int) and num_classes < 0:
        num_classes = tf.cast(tf.reduce_max(x), tf.int32) + 1
    return tf.one_hot(x, num_classes, on_value=1, off_value=0, dtype=tf.int64)


def window_places(length: Size, kernel: int, dilation: int, padding: int, stride: int) -> Any:
    """Positions (kernel, windows) in a padded axis of ``length`` elements."""
    count = (length + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    starts = tf.range(count) * stride
    return (tf.range(kernel) * dilation)[:, tf.newaxis] + starts[tf.newaxis]


@lowers("im2col")
def im2col(
    x: Any,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Any:
    """Every window of a plane as a column."""
    if rank(x) == 3:
        return tf.squeeze(im2col(x[tf.newaxis], kernel_size, dilation, padding, stride), 0)
    down, across = (
        window_places(*each)
        for each in zip(sizes(x)[2:], kernel_size, dilation, padding, stride, strict=True)
    )
    if any(padding):
        x = tf.pad(x, [[0, 0], [0, 0], *([p, p] for p in padding)])
    windows = tf.gather(tf.gather(x, across, axis=3), down, axis=2)
    batch, channels, *_ = sizes(x)
    windows = tf.transpose(windows, [0, 1, 2, 4, 3, 5])
    rows = channels * kernel_size[0] * kernel_size[1]
    return reshape(windows, [batch, rows, size(down, 1) * size(across, 1)])


@lowers("pixel_shuffle")
def pixel_shuffle(x: Any, upscale_factor: int) -> Any:
    *batch, channels, height, width = sizes(x)
    r, kept = upscale_factor, channels // upscale_factor**2
    y = reshape(x, [-1, r, r, height, width])
    y = tf.transpose(y, [0, 3, 1, 4, 2])
    return reshape(y, [*batch, kept, height * r, width * r])


@lowers("pixel_unshuffle")
def pixel_unshuffle(x: Any, downscale_factor: int) -> Any:
    *batch, channels, height, width = sizes(x)
    r = downscale_factor
    y = reshape(x, [-1, height // r, r, width // r, r])
    y = tf.transpose(y, [0, 2, 4, 1, 3])
    return reshape(y, [*batch, channels * r * r, height // r, width // r])


@lowers("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(x: Any, groups: int) -> Any:
    lengths = sizes(x)
    y = reshape(x, [lengths[0], groups, lengths[1] // groups, product(lengths[2:])])
    return reshape(tf.transpose(y, [0, 2, 1, 3]), lengths)


@lowers("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, None, None, None]:
    """The sum, mean or maximum (``mode`` 0, 1, 2) of each bag's rows."""
    count = size(offsets, 0) - int(include_last_offset)
    total = size(indices, 0)
    starts = tf.cast(offsets[:count], tf.int32)[:, tf.newaxis]
    # The bag of an element is the number of bags that begin at it or before it, less one.
    begun = tf.scatter_nd(starts, tf.ones_like(starts[:, 0]), shape([total + 1]))
    bag = tf.cumsum(begun)[:total] - 1
    if padding_idx >= 0:
        bag = tf.where(tf.cast(indices, tf.int32) == padding_idx, -1, bag)  # dropped
    rows = tf.gather(weight, indices)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, tf.newaxis]
    if mode == 2:
        best = tf.math.unsorted_segment_max(rows, bag, count)
    else:
        best = tf.math.unsorted_segment_sum(rows, bag, count)
    if mode:
        ones = tf.cast(bag >= 0, rows.dtype)
        filled = tf.math.unsorted_segment_sum(ones, bag, count)[:, tf.newaxis]
        one = tf.ones([], rows.dtype)
        best = best / tf.maximum(filled, one) if mode == 1 else tf.where(filled > 0, best, 0 * one)
    return best, None, None, None
