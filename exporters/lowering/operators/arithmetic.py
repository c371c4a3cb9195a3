"""Elementwise arithmetic, with PyTorch's promotion of datatypes and rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from modelport.exporters.lowering.built_in import only_built_in
from modelport.exporters.lowering.datatypes import cast, floating, is_tensor, promoted
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.runtime.tensorflow_runtime import tf

SUMS, PRODUCTS = ("AddV2", "Sub"), ("Mul", "RealDiv")


def _scaled(x: Any, alpha: Any) -> Any:
    return x if not is_tensor(alpha) and alpha == 1 else x * cast(alpha, x.dtype)


def _in_order(x: Any, other: Any, kinds: tuple[str, str]) -> tuple[Any, Any]:
    """Keep a constant out of the operation before it.

    TensorFlow's grappler computes ``(a - b) + c`` as ``(a + c) - b``, which loses a small ``c``
    (``ConstantPushDown``, constant_folding.cc). It does not look past ``EnsureShape``, which copies
    nothing.
    """
    if _kind(other) == "Const" and _kind(x) in kinds:
        x = tf.ensure_shape(x, x.shape)
    elif _kind(x) == "Const" and _kind(other) in kinds:
        other = tf.ensure_shape(other, other.shape)
    return x, other


def _kind(x: Any) -> str:
    """The operation that gives a tensor of a graph, which holds any other tensor as a constant."""
    return str(getattr(getattr(x, "op", None), "type", "Const"))


def _nothing(x: Any, other: Any) -> Any:
    """The empty result of ``x`` and ``other``; None if it has elements or an unknown size.

    TensorFlow's grappler takes an empty constant for ones, makes a ``Tile`` of a product with it
    (``ReplaceMulWithBroadcastByTile``, arithmetic_optimizer.cc, 2.21), and divides by its sizes,
    which ends the process. A quotient becomes a product.
    """
    shape = tf.broadcast_static_shape(x.shape, other.shape)
    return tf.zeros(shape, x.dtype) if shape.num_elements() == 0 else None


@lowers("add.Tensor", "add.Scalar")
def add(x: Any, other: Any, alpha: Any = 1) -> Any:
    x, other = promoted(x, other)
    if x.dtype == tf.bool:
        return tf.logical_or(x, other) if alpha else tf.identity(x)
    x, other = _in_order(x, _scaled(other, alpha), SUMS)
    return x + other


@lowers("sub.Tensor", "sub.Scalar")
def sub(x: Any, other: Any, alpha: Any = 1) -> Any:
    x, other = promoted(x, other)
    x, other = _in_order(x, _scaled(other, alpha), SUMS)
    return x - other


@lowers("rsub.Tensor", "rsub.Scalar")
def rsub(x: Any, other: Any, alpha: Any = 1) -> Any:
    return sub(other, x, alpha)


@lowers("mul.Tensor", "mul.Scalar")
def mul(x: Any, other: Any) -> Any:
    x, other = promoted(x, other)
    if x.dtype == tf.bool:
        return tf.logical_and(x, other)
    x, other = _in_order(x, other, PRODUCTS)
    nothing = _nothing(x, other)
    return x * other if nothing is None else nothing


@lowers("div.Tensor", "div.Scalar")
def div(x: Any, other: Any) -> Any:
    x, other = promoted(x, other)
    x, other = _in_order(floating(x), floating(other), PRODUCTS)
    nothing = _nothing(x, other)
    return x / other if nothing is None else nothing


@lowers("div.Tensor_mode", "div.Scalar_mode")
def div_mode(x: Any, other: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return div(x, other)
    x, other = promoted(x, other)
    if rounding_mode == "floor":
        return floor_quotient(x, other) if x.dtype.is_integer else _floored(x, other)
    return _truncated_quotient(x, other) if x.dtype.is_integer else truncated(x / other)


def floor_quotient(x: Any, other: Any) -> Any:
    """The floor of a quotient of integers; TFLite has no kernel for those of int64.

    Each division in floating point corrects the rounding of the one before.
    """
    if not only_built_in() or x.dtype != tf.int64:
        return tf.math.floordiv(x, other)
    left = x - tf.math.floormod(x, other)
    result = tf.zeros_like(left)
    for _ in range(3):
        part = tf.cast(tf.round(tf.cast(left, tf.float32) / tf.cast(other, tf.float32)), tf.int64)
        result, left = result + part, left - part * other
    return result


def _truncated_quotient(x: Any, other: Any) -> Any:
    if not only_built_in() or x.dtype != tf.int64:
        return tf.truncatediv(x, other)
    return sign(x) * sign(other) * floor_quotient(absolute(x), absolute(other))


def _floored(x: Any, other: Any) -> Any:
    """The floor of the exact quotient, which a rounded one may exceed: 4.2 / 0.7."""
    exact = tf.round((x - tf.math.floormod(x, other)) / other)
    return tf.where(tf.equal(other, 0), x / other, exact)


@lowers("floor_divide")
def floor_divide(x: Any, other: Any) -> Any:
    return div_mode(x, other, "floor")


@lowers("remainder.Tensor", "remainder.Scalar")
def remainder(x: Any, other: Any) -> Any:
    """The remainder with the sign of the divisor."""
    x, other = promoted(x, other)
    return tf.math.floormod(x, other)


@lowers("fmod.Tensor", "fmod.Scalar")
def fmod(x: Any, other: Any) -> Any:
    """The remainder with the sign of the dividend."""
    x, other = promoted(x, other)
    if x.dtype.is_integer:
        return x - _truncated_quotient(x, other) * other
    return _float_fmod(x, other)


def _float_fmod(x: Any, other: Any) -> Any:
    result = tf.math.floormod(tf.abs(x), tf.abs(other))
    return tf.where(x < 0, -result, result)


def larger(x: Any, other: Any) -> Any:
    """The larger of two tensors of one datatype; NaN if either is."""
    return tf.logical_or(x, other) if x.dtype == tf.bool else tf.maximum(x, other)


def smaller(x: Any, other: Any) -> Any:
    """The smaller of two tensors of one datatype; NaN if either is."""
    return tf.logical_and(x, other) if x.dtype == tf.bool else tf.minimum(x, other)


@lowers("maximum")
def maximum(x: Any, other: Any) -> Any:
    return larger(*promoted(x, other))


@lowers("minimum")
def minimum(x: Any, other: Any) -> Any:
    return smaller(*promoted(x, other))


@lowers("atan2")
def atan2(x: Any, other: Any) -> Any:
    x, other = promoted(x, other)
    return tf.atan2(floating(x), floating(other))


@lowers("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def power(x: Any, exponent: Any) -> Any:
    simple = None if is_tensor(exponent) or isinstance(exponent, complex) else exponent
    x, exponent = promoted(x, exponent)
    if x.dtype.is_integer:
        # A power of integers; a negative exponent gives 0 except for 1 and -1.
        if exponent.dtype == tf.uint8:
            return cast(tf.pow(cast(x, tf.int32), cast(exponent, tf.int32)), tf.uint8)
        natural = _natural_power(x, absolute(exponent))
        return tf.where((exponent < 0) & (absolute(x) != 1), tf.zeros_like(natural), natural)
    if simple == 2:
        return x * x
    if simple == 3:
        return x * x * x
    if simple == 0.5 and x.dtype.is_floating:
        return tf.sqrt(x)
    if simple == -0.5 and x.dtype.is_floating:
        return tf.math.rsqrt(x)
    return tf.pow(x, exponent)


def _natural_power(x: Any, exponent: Any) -> Any:
    """A power of integers; for TFLite by squaring, which is exact up to the largest int64."""
    if not only_built_in() or x.dtype != tf.int64:
        return tf.pow(x, exponent)
    result, one = tf.ones_like(x * exponent), tf.ones([], x.dtype)
    for _ in range(6):  # 2**64 has no int64
        result = result * tf.where(tf.equal(tf.math.floormod(exponent, 2), one), x, one)
        exponent, x = floor_quotient(exponent, 2 * one), x * x
    return result


@lowers("clamp", "clamp.Tensor")
def clamp(x: Any, minimum: Any = None, maximum: Any = None) -> Any:
    bounds = [each for each in (minimum, maximum) if each is not None]
    x, *found = promoted(x, *bounds)
    if minimum is not None:
        x = larger(x, found[0])
    return x if maximum is None else smaller(x, found[-1])


@lowers("clamp_min", "clamp_min.Tensor")
def clamp_min(x: Any, minimum: Any) -> Any:
    return clamp(x, minimum)


@lowers("clamp_max", "clamp_max.Tensor")
def clamp_max(x: Any, maximum: Any) -> Any:
    return clamp(x, None, maximum)


@lowers("abs")
def absolute(x: Any) -> Any:
    if x.dtype.is_unsigned or x.dtype == tf.bool:
        return tf.identity(x)
    # TensorFlow Lite's kernel takes no int64.
    return tf.maximum(x, -x) if x.dtype.is_integer else tf.abs(x)


@lowers("neg")
def negative(x: Any) -> Any:
    return tf.negative(x)


@lowers("sign", "sgn")
def sign(x: Any) -> Any:
    if x.dtype == tf.bool or x.dtype.is_complex:
        return tf.identity(x) if x.dtype == tf.bool else tf.sign(x)
    zero = tf.zeros([], x.dtype)
    return tf.cast(x > zero, x.dtype) - tf.cast(x < zero, x.dtype)


def truncated(x: Any) -> Any:
    """``x`` without its fraction."""
    return tf.where(x < 0, tf.math.ceil(x), tf.floor(x))


def _rounding(name: str, function: Callable[[Any], Any]) -> None:
    """Register a rounding, which leaves integers as they are."""
    lowers(name)(lambda x: tf.identity(x) if x.dtype.is_integer else function(x))


_rounding("floor", tf.floor)
_rounding("ceil", tf.math.ceil)
_rounding("round", tf.round)
_rounding("trunc", truncated)


@lowers("round.decimals")
def round_decimals(x: Any, decimals: int = 0) -> Any:
    if x.dtype.is_integer:
        return tf.identity(x)
    scale = cast(10.0 ** abs(decimals), x.dtype)
    return tf.round(x * scale) / scale if decimals >= 0 else tf.round(x / scale) * scale


@lowers("frac")
def frac(x: Any) -> Any:
    return x - truncated(x)


def _log_base(base: float) -> Callable[[Any], Any]:
    return lambda x: tf.math.log(x) / cast(math.log(base), x.dtype)


def _arc_cosine(x: Any) -> Any:
    # TensorFlow Lite has the arc tangent of two arguments alone.
    return tf.acos(x) if x.dtype.is_complex else tf.atan2(tf.sqrt((1 - x) * (1 + x)), x)


def _arc_sine(x: Any) -> Any:
    return tf.asin(x) if x.dtype.is_complex else tf.atan2(x, tf.sqrt((1 - x) * (1 + x)))


def _arc_tangent(x: Any) -> Any:
    return tf.atan(x) if x.dtype.is_complex else tf.atan2(x, tf.ones_like(x))


#: Functions of one floating-point argument; integers are converted first.
_FLOATING: dict[str, Callable[[Any], Any]] = {
    "acos": _arc_cosine,
    "acosh": tf.acosh,
    "asin": _arc_sine,
    "asinh": tf.asinh,
    "atan": _arc_tangent,
    "atanh": tf.atanh,
    "cos": tf.cos,
    "cosh": tf.cosh,
    "erf": tf.math.erf,
    "erfc": tf.math.erfc,
    "erfinv": tf.math.erfinv,
    "exp": tf.exp,
    "exp2": lambda x: tf.exp(x * cast(math.log(2), x.dtype)),
    "expm1": tf.math.expm1,
    "lgamma": tf.math.lgamma,
    "log": tf.math.log,
    "log10": _log_base(10),
    "log1p": tf.math.log1p,
    "log2": _log_base(2),
    "reciprocal": lambda x: 1 / x,
    "rsqrt": tf.math.rsqrt,
    "sigmoid": tf.sigmoid,
    "sin": tf.sin,
    "sinh": tf.sinh,
    "sqrt": tf.sqrt,
    "tan": tf.tan,
    "tanh": tf.tanh,
}


def _register_floating(name: str, function: Callable[[Any], Any]) -> None:
    lowers(name)(lambda x: function(floating(x)))


for _name, _function in _FLOATING.items():
    _register_floating(_name, _function)


def _bitwise(name: str, of_bools: Callable[..., Any], of_integers: Callable[..., Any]) -> None:
    @lowers(f"{name}.Tensor", f"{name}.Scalar", f"{name}.Scalar_Tensor")
    def compute(x: Any, other: Any) -> Any:
        x, other = promoted(x, other)
        if x.dtype == tf.bool:
            return of_bools(x, other)
        return _by_limbs(name, x, other) if only_built_in() else of_integers(x, other)


#: Bits of a part of an integer: three make an int64.
_LIMB = 22


def _by_limbs(name: str, x: Any, other: Any) -> Any:
    """A bitwise operation with TFLite's only one, the exclusive or of int32.

    ``x + y`` is ``(x ^ y) + 2 * (x & y)``.
    """
    base = tf.constant(1 << _LIMB, tf.int64)
    left = [tf.cast(x, tf.int64), tf.cast(other, tf.int64)]
    result: Any = None
    for limb in range(3):
        parts = left
        if limb < 2:
            parts = [tf.math.floormod(each, base) for each in left]
            left = [floor_quotient(each, base) for each in left]
        a, b = (tf.cast(each, tf.int32) for each in parts)
        apart = tf.bitwise.bitwise_xor(*_same_shape(a, b))
        shared = tf.math.floordiv(a + b - apart, 2)
        found = {"bitwise_xor": apart, "bitwise_and": shared}.get(name, apart + shared)
        found = tf.cast(found, tf.int64) * (1 << (_LIMB * limb))
        result = found if result is None else result + found
    return tf.cast(result, x.dtype)


def _same_shape(x: Any, other: Any) -> tuple[Any, Any]:
    nothing = tf.zeros_like(x) * tf.zeros_like(other)
    return x + nothing, other + nothing


_bitwise("bitwise_and", tf.logical_and, tf.bitwise.bitwise_and)
_bitwise("bitwise_or", tf.logical_or, tf.bitwise.bitwise_or)
_bitwise("bitwise_xor", tf.not_equal, tf.bitwise.bitwise_xor)


@lowers("bitwise_not")
def bitwise_not(x: Any) -> Any:
    if x.dtype == tf.bool:
        return tf.logical_not(x)
    return -1 - x if only_built_in() and not x.dtype.is_unsigned else tf.bitwise.invert(x)


def _shifting(name: str, function: Callable[..., Any], by: Callable[..., Any]) -> None:
    @lowers(f"{name}.Tensor", f"{name}.Tensor_Scalar", f"{name}.Scalar_Tensor")
    def compute(x: Any, other: Any) -> Any:
        x, other = promoted(x, other)
        if not only_built_in():
            return function(x, other)
        power = tf.gather(tf.constant([1 << n for n in range(63)], tf.int64), other)
        return tf.cast(by(tf.cast(x, tf.int64), power), x.dtype)


_shifting("bitwise_left_shift", tf.bitwise.left_shift, tf.multiply)
_shifting("bitwise_right_shift", tf.bitwise.right_shift, floor_quotient)
