"""Normalization layers: batch, layer, group and RMS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelport.exporters.lowering.operators.layout import (
    channels_first,
    channels_last_operand,
    reshape,
)
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.lowering.sizes import Size, rank, size, sizes
from modelport.exporters.lowering.weights import at_export, is_constant
from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.gateway.errors import Unsupported


def _wide(x: Any) -> Any:
    """``x`` in at least float32, in which PyTorch computes statistics."""
    return tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x


def _standardized(x: Any, over: list[int], eps: float) -> tuple[Any, Any, Any]:
    """``x`` with mean 0 and variance 1 ``over`` some axes, its mean, and 1 / its deviation."""
    mean = tf.reduce_mean(x, over, keepdims=True)
    centred = x - mean
    scale = tf.math.rsqrt(tf.reduce_mean(tf.square(centred), over, keepdims=True) + eps)
    return centred * scale, mean, scale


def _affine(y: Any, weight: Any, bias: Any, dim: int | None = None) -> Any:
    """``y * weight + bias`` along ``dim``, or over the last axes."""
    for parameter, compute in ((weight, tf.multiply), (bias, tf.add)):
        if parameter is not None:
            parameter = tf.cast(parameter, y.dtype)
            if dim is not None:
                parameter = tf.reshape(parameter, [-1] + [1] * (rank(y) - dim - 1))
            y = compute(y, parameter)
    return y


@lowers("native_layer_norm")
def native_layer_norm(
    x: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Any, ...]:
    over = list(range(rank(x) - len(normalized_shape), rank(x)))
    y, mean, scale = _standardized(_wide(x), over, eps)
    return tuple(tf.cast(v, x.dtype) for v in (_affine(y, weight, bias), mean, scale))


@lowers("layer_norm")
def layer_norm(
    x: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    return native_layer_norm(x, normalized_shape, weight, bias, eps)[0]


@lowers("rms_norm")
def rms_norm(
    x: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Any:
    return fused_rms_norm(x, normalized_shape, weight, eps)[0]


@lowers("_fused_rms_norm")
def fused_rms_norm(
    x: Any, normalized_shape: Sequence[int], weight: Any, eps: float | None
) -> tuple[Any, Any]:
    over = list(range(rank(x) - len(normalized_shape), rank(x)))
    y = _wide(x)
    smallest = tf.experimental.numpy.finfo(y.dtype.as_numpy_dtype).eps if eps is None else eps
    scale = tf.math.rsqrt(tf.reduce_mean(tf.square(y), over, keepdims=True) + float(smallest))
    return tf.cast(_affine(y * scale, weight, None), x.dtype), scale


@lowers("native_group_norm")
def native_group_norm(
    x: Any,
    weight: Any,
    bias: Any,
    batch: Size,
    channels: Size,
    area: Size,
    groups: int,
    eps: float,
) -> tuple[Any, ...]:
    split = reshape(_wide(x), [size(x, 0), groups, -1])
    y, mean, scale = _standardized(split, [2], eps)
    y = _affine(reshape(y, sizes(x)), weight, bias, 1)
    results = y, tf.squeeze(mean, 2), tf.squeeze(scale, 2)
    return tuple(tf.cast(v, x.dtype) for v in results)


@lowers("group_norm")
def group_norm(
    x: Any,
    groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    return native_group_norm(x, weight, bias, 0, 0, 0, groups, eps)[0]


@lowers("_native_batch_norm_legit_no_training")
def batch_norm_of_running_statistics(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> tuple[Any, ...]:
    """Scale and shift each channel; TFLite's converter merges it into a convolution."""
    wide = _wide(x).dtype
    scale = at_export(
        _scale, tf.cast(variance, wide) if not is_constant(variance) else variance, eps
    )
    scale = tf.cast(scale, wide)
    if weight is not None:
        scale = scale * tf.cast(weight, wide)
    shift = -tf.cast(mean, wide) * scale
    if bias is not None:
        shift = shift + tf.cast(bias, wide)
    below = channels_last_operand(x)
    if below is not None:
        y = channels_first(tf.cast(tf.cast(below, wide) * scale + shift, x.dtype))
    else:
        y = tf.cast(_affine(_wide(x), scale, shift, 1), x.dtype)
    empty = tf.zeros([0], wide)
    return y, empty, empty


def _scale(variance: Any, eps: float) -> Any:
    return tf.math.rsqrt(variance + eps)


@lowers("_native_batch_norm_legit.no_stats")
def batch_norm_of_batch_statistics(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    """Batch normalization without running statistics, which instance normalization amounts to."""
    over = [dim for dim in range(rank(x)) if dim != 1]
    y, mean, scale = _standardized(_wide(x), over, eps)
    results = _affine(y, weight, bias, 1), tf.reshape(mean, [-1]), tf.reshape(scale, [-1])
    return tuple(tf.cast(v, x.dtype) for v in results)


@lowers("_native_batch_norm_legit", "native_batch_norm")
def batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if training and mean is not None:
        raise Unsupported("it updates running statistics, as in training; call eval() first")
    if training:
        return batch_norm_of_batch_statistics(x, weight, bias, True, momentum, eps)
    return batch_norm_of_running_statistics(x, weight, bias, mean, variance, momentum, eps)
