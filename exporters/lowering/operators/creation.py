"""Tensors made of numbers and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from modelport.exporters.lowering.datatypes import cast, is_tensor, tf_dtype
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.lowering.sizes import Size, is_static, shape, sizes, static_shape
from modelport.exporters.runtime.tensorflow_runtime import tf

#: Longest sequence of numbers that becomes a constant.
LONGEST_CONSTANT = 4096


def filled(dims: Sequence[Size], value: Any, dtype: Any) -> Any:
    """A tensor of one value."""
    result = tf.fill(shape(dims), cast(value, dtype))
    if not is_static(dims):
        result.set_shape(static_shape(dims))
    return result


def _dtype_of(value: Any) -> torch.dtype:
    """The datatype of a tensor that PyTorch makes of a number."""
    if is_tensor(value):
        number = False if value.dtype == tf.bool else 1 if value.dtype.is_integer else 1.0
        return _dtype_of(number)
    if isinstance(value, bool):
        return torch.bool
    return torch.int64 if isinstance(value, int) else torch.tensor(value).dtype


@lowers("full")
def full(dims: Sequence[Size], value: Any, dtype: Any = None) -> Any:
    return filled(dims, value, dtype or _dtype_of(value))


@lowers("full_like")
def full_like(x: Any, value: Any, dtype: Any = None) -> Any:
    return filled(sizes(x), value, dtype or x.dtype)


@lowers("new_full")
def new_full(x: Any, dims: Sequence[Size], value: Any, dtype: Any = None) -> Any:
    return filled(dims, value, dtype or x.dtype)


@lowers("fill.Scalar", "fill.Tensor")
def fill(x: Any, value: Any) -> Any:
    return filled(sizes(x), value, x.dtype)


@lowers("zeros", "empty.memory_format")
def zeros(dims: Sequence[Size], dtype: Any = None) -> Any:
    return filled(dims, 0, dtype or torch.get_default_dtype())


@lowers("ones")
def ones(dims: Sequence[Size], dtype: Any = None) -> Any:
    return filled(dims, 1, dtype or torch.get_default_dtype())


@lowers("empty_strided", "empty_permuted")
def empty_strided(dims: Sequence[Size], order: Sequence[Size], dtype: Any = None) -> Any:
    return zeros(dims, dtype)


@lowers("zeros_like", "empty_like")
def zeros_like(x: Any, dtype: Any = None) -> Any:
    return filled(sizes(x), 0, dtype or x.dtype)


@lowers("ones_like")
def ones_like(x: Any, dtype: Any = None) -> Any:
    return filled(sizes(x), 1, dtype or x.dtype)


@lowers("new_zeros", "new_empty")
def new_zeros(x: Any, dims: Sequence[Size], dtype: Any = None) -> Any:
    return filled(dims, 0, dtype or x.dtype)


@lowers("new_ones")
def new_ones(x: Any, dims: Sequence[Size], dtype: Any = None) -> Any:
    return filled(dims, 1, dtype or x.dtype)


@lowers("scalar_tensor")
def scalar_tensor(value: Any, dtype: Any = None) -> Any:
    return cast(value, dtype or torch.get_default_dtype())


@lowers("arange.start_step")
def arange(start: Any, end: Any, step: Any = 1, dtype: Any = None) -> Any:
    numbers = (start, end, step)
    if not any(is_tensor(x) for x in numbers):
        values = torch.arange(start, end, step, dtype=dtype)
        if values.numel() <= LONGEST_CONSTANT:
            return tf.constant(values.numpy())
        dtype = values.dtype
    floats = (x.dtype.is_floating if is_tensor(x) else isinstance(x, float) for x in numbers)
    computed = torch.float32 if any(floats) else torch.int64
    dtype = tf_dtype(dtype or computed)
    # Indices of int32 are what TensorFlow Lite adds and compares fastest.
    within = tf.float32 if computed.is_floating_point else tf.int32
    return cast(tf.range(*(cast(x, within) for x in numbers)), dtype)


@lowers("arange.start")
def arange_start(start: Any, end: Any, dtype: Any = None) -> Any:
    return arange(start, end, 1, dtype)


@lowers("arange")
def arange_end(end: Any, dtype: Any = None) -> Any:
    return arange(0, end, 1, dtype)
