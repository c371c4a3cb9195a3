"""Products of matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelport.exporters.lowering.built_in import only_built_in
from modelport.exporters.lowering.datatypes import cast
from modelport.exporters.lowering.operators.layout import reshape
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.lowering.sizes import rank, shape, size, sizes
from modelport.exporters.runtime.tensorflow_runtime import tf


def multiplied(x: Any, other: Any, transpose: bool = False) -> Any:
    """The product of two tensors of matrices; ``transpose`` concerns the second."""
    if x.dtype in (tf.bool, tf.int8, tf.int16, tf.uint8):
        return cast(multiplied(cast(x, tf.int32), cast(other, tf.int32), transpose), x.dtype)
    if only_built_in() and x.dtype.is_integer:  # TFLite multiplies matrices of floats
        other = tf.linalg.matrix_transpose(other) if transpose else other
        return tf.reduce_sum(tf.expand_dims(x, -1) * tf.expand_dims(other, -3), -2)
    if rank(other) == 2 and rank(x) > 2:
        return _by_rows(x, lambda rows: tf.matmul(rows, other, transpose_b=transpose))
    return tf.matmul(x, other, transpose_b=transpose)


def _by_rows(x: Any, function: Callable[[Any], Any]) -> Any:
    """A function of a matrix over all rows of ``x``: one product instead of a batch of them."""
    *leading, width = sizes(x)
    result = function(tf.reshape(x, shape([-1, width])))
    return reshape(result, [*leading, size(result, -1)])


@lowers("mm", "bmm")
def mm(x: Any, other: Any) -> Any:
    return multiplied(x, other)


@lowers("matmul")
def matmul(x: Any, other: Any) -> Any:
    """The product with broadcasting; vectors are a row on the left and a column on the right."""
    left, right = rank(x) == 1, rank(other) == 1
    result = multiplied(
        tf.expand_dims(x, 0) if left else x, tf.expand_dims(other, 1) if right else other
    )
    result = tf.squeeze(result, [-1]) if right else result
    return tf.squeeze(result, [-1 if right else -2]) if left else result


@lowers("mv")
def mv(x: Any, vector: Any) -> Any:
    return matmul(x, vector)


@lowers("dot")
def dot(x: Any, other: Any) -> Any:
    return tf.reduce_sum(x * other)


def _combined(bias: Any, result: Any, beta: Any, alpha: Any) -> Any:
    result = result if alpha == 1 else result * cast(alpha, result.dtype)
    if beta == 0:
        return result
    if beta == 1 and rank(bias) == 1 and bias.shape[0] == result.shape[-1] and bias.shape[0]:
        return tf.nn.bias_add(result, bias)
    return result + (bias if beta == 1 else bias * cast(beta, bias.dtype))


@lowers("addmm", "baddbmm")
def addmm(bias: Any, x: Any, other: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    result = multiplied(x, other)
    return _combined(bias, result, beta, alpha)


@lowers("addmv")
def addmv(bias: Any, x: Any, vector: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    scaled = bias if beta == 1 else bias * cast(beta, bias.dtype)
    result = matmul(x, vector)
    return scaled + (result if alpha == 1 else result * cast(alpha, result.dtype))


@lowers("linear")
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if rank(weight) == 1:
        result = matmul(x, weight)
        return result if bias is None else result + bias
    if rank(x) == 1:
        return tf.squeeze(linear(tf.expand_dims(x, 0), weight, bias), [0])
    if rank(x) == 2:
        return _affine(x, weight, bias)
    return _by_rows(x, lambda rows: _affine(rows, weight, bias))


def _affine(rows: Any, weight: Any, bias: Any) -> Any:
    result = multiplied(rows, weight, transpose=True)
    return result if bias is None else tf.nn.bias_add(result, bias)
