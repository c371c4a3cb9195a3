"""Activation functions and softmax."""

from __future__ import annotations

from typing import Any

from modelport.exporters.lowering.datatypes import cast
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.lowering.sizes import axis, rank
from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.gateway.errors import Unsupported


@lowers("relu")
def relu(x: Any) -> Any:
    return tf.nn.relu(x)


@lowers("relu6")
def relu6(x: Any) -> Any:
    return tf.nn.relu6(x)


@lowers("gelu")
def gelu(x: Any, approximate: str = "none") -> Any:
    return tf.nn.gelu(x, approximate == "tanh")


@lowers("silu")
def silu(x: Any) -> Any:
    return x * tf.sigmoid(x)


@lowers("mish")
def mish(x: Any) -> Any:
    return x * tf.tanh(_softplus(x))


def _softplus(x: Any) -> Any:
    """log(1 + exp(x)) from TFLite's operators, without overflow."""
    return tf.nn.relu(x) + tf.math.log1p(tf.exp(-tf.abs(x)))


@lowers("softplus")
def softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    scaled = x * cast(beta, x.dtype)
    smooth = _softplus(scaled) / cast(beta, x.dtype)
    return tf.where(scaled > cast(threshold, x.dtype), x, smooth)


@lowers("log_sigmoid_forward")
def log_sigmoid_forward(x: Any) -> tuple[Any, None]:
    """The result and a buffer that serves training alone."""
    return log_sigmoid(x), None


@lowers("log_sigmoid")
def log_sigmoid(x: Any) -> Any:
    return -_softplus(-x)


@lowers("hardsigmoid")
def hardsigmoid(x: Any) -> Any:
    return tf.nn.relu6(x + cast(3, x.dtype)) / cast(6, x.dtype)


@lowers("hardswish")
def hardswish(x: Any) -> Any:
    return x * tf.nn.relu6(x + cast(3, x.dtype)) / cast(6, x.dtype)


@lowers("hardtanh")
def hardtanh(x: Any, min_val: float = -1, max_val: float = 1) -> Any:
    if (min_val, max_val) == (0, 6) and x.dtype.is_floating:
        return tf.nn.relu6(x)
    return tf.minimum(tf.maximum(x, cast(min_val, x.dtype)), cast(max_val, x.dtype))


@lowers("leaky_relu")
def leaky_relu(x: Any, negative_slope: float = 0.01) -> Any:
    if 0 <= negative_slope <= 1:
        return tf.nn.leaky_relu(x, negative_slope)
    return tf.where(x > 0, x, x * cast(negative_slope, x.dtype))


@lowers("rrelu_with_noise")
def rrelu_with_noise(
    x: Any, noise: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> Any:
    if training:
        raise Unsupported("it draws random numbers, as in training; call eval() first")
    return leaky_relu(x, (lower + upper) / 2)


@lowers("elu")
def elu(x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    if (alpha, scale, input_scale) == (1, 1, 1):
        return tf.nn.elu(x)
    alpha, scale, input_scale = (cast(v, x.dtype) for v in (alpha, scale, input_scale))
    below = alpha * (tf.exp(tf.minimum(x, cast(0, x.dtype)) * input_scale) - cast(1, x.dtype))
    return scale * tf.where(x > 0, x, below)


@lowers("celu")
def celu(x: Any, alpha: float = 1) -> Any:
    return elu(x, alpha, 1, 1 / alpha)


@lowers("selu")
def selu(x: Any) -> Any:
    return elu(x, 1.6732632423543772, 1.0507009873554805)


@lowers("_prelu_kernel")
def prelu(x: Any, weight: Any) -> Any:
    return tf.nn.relu(x) + weight * tf.minimum(x, cast(0, x.dtype))


@lowers("glu")
def glu(x: Any, dim: int = -1) -> Any:
    value, gate = tf.split(x, 2, axis(x, dim))
    return value * tf.sigmoid(gate)


@lowers("threshold")
def threshold(x: Any, threshold: float, value: float) -> Any:
    return tf.where(x <= cast(threshold, x.dtype), cast(value, x.dtype), x)


@lowers("hardshrink")
def hardshrink(x: Any, lambd: float = 0.5) -> Any:
    return tf.where(tf.abs(x) <= cast(lambd, x.dtype), cast(0, x.dtype), x)


@lowers("softshrink")
def softshrink(x: Any, lambd: float = 0.5) -> Any:
    excess = tf.nn.relu(tf.abs(x) - cast(lambd, x.dtype))
    return tf.where(x < 0, -excess, excess)


@lowers("_softmax")
def softmax(x: Any, dim: int, half_to_float: bool = False) -> Any:
    if half_to_float:
        x = tf.cast(x, tf.float32)
    return tf.nn.softmax(x, axis(x, dim)) if rank(x) else tf.ones_like(x)


@lowers("_log_softmax")
def log_softmax(x: Any, dim: int, half_to_float: bool = False) -> Any:
    if half_to_float:
        x = tf.cast(x, tf.float32)
    return tf.nn.log_softmax(x, axis(x, dim)) if rank(x) else tf.zeros_like(x)


@lowers("softmax.int", "special_softmax")
def softmax_in_datatype(x: Any, dim: int, dtype: Any = None) -> Any:
    return softmax(x if dtype is None else cast(x, dtype), dim)


@lowers("log_softmax.int", "special_log_softmax")
def log_softmax_in_datatype(x: Any, dim: int, dtype: Any = None) -> Any:
    return log_softmax(x if dtype is None else cast(x, dtype), dim)


@lowers("_safe_softmax")
def safe_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    """Softmax whose result is zero where every element is minus infinity."""
    x = x if dtype is None else cast(x, dtype)
    nothing = tf.reduce_max(x, axis(x, dim), keepdims=True) == cast(float("-inf"), x.dtype)
    y = tf.nn.softmax(tf.where(nothing, cast(0, x.dtype), x), axis(x, dim))
    return tf.where(nothing, cast(0, x.dtype), y)
