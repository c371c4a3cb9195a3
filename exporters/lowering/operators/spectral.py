"""Fourier transforms and complex numbers; for TFLite, ``decompositions.complex_parts`` are real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from modelport.exporters.lowering.datatypes import cast
from modelport.exporters.lowering.operators.shapes import unfold
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.lowering.sizes import Size, axis, product, rank, size
from modelport.exporters.runtime.tensorflow_runtime import tf


def _last(x: Any, dim: int, transform: Callable[[Any], Any]) -> Any:
    """``transform``, which works along the last dimension, along ``dim``."""
    dim = axis(x, dim)
    if dim == rank(x) - 1:
        return transform(x)
    order = list(range(rank(x)))
    order[dim], order[-1] = order[-1], order[dim]
    return tf.transpose(transform(tf.transpose(x, order)), order)


def _normalized(y: Any, count: Size, normalization: int) -> Any:
    """``y`` divided by nothing, by the square root of ``count``, or by ``count``."""
    if normalization == 0:
        return y
    real = tf.float64 if y.dtype in (tf.complex128, tf.float64) else tf.float32
    divisor = tf.cast(count, real)
    return y / tf.cast(tf.sqrt(divisor) if normalization == 1 else divisor, y.dtype)


def _complex(x: Any) -> Any:
    if x.dtype.is_complex:
        return x
    return tf.cast(x, tf.complex128 if x.dtype == tf.float64 else tf.complex64)


def _inverse(x: Any) -> Any:
    """The inverse transform, not divided by the number of elements."""
    return tf.signal.ifft(x) * tf.cast(size(x, -1), x.dtype)


@lowers("_fft_c2c")
def fft_c2c(x: Any, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    count = product(size(x, d) for d in dim)
    for each in dim:
        x = _last(x, each, tf.signal.fft if forward else _inverse)
    return _normalized(x, count, normalization)


@lowers("_fft_r2c")
def fft_r2c(x: Any, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    if not onesided:
        return fft_c2c(_complex(x), dim, normalization, True)
    count = product(size(x, d) for d in dim)
    y = _last(x, dim[-1], tf.signal.rfft)
    for each in dim[:-1]:
        y = _last(y, each, tf.signal.fft)
    return _normalized(y, count, normalization)


@lowers("_fft_c2r")
def fft_c2r(x: Any, dim: Sequence[int], normalization: int, last_dim_size: Size) -> Any:
    for each in dim[:-1]:
        x = _last(x, each, _inverse)
    count = product([last_dim_size, *(size(x, d) for d in dim[:-1])])

    def inverse(y: Any) -> Any:
        real = tf.signal.irfft(y, [last_dim_size])
        return real * tf.cast(last_dim_size, real.dtype)

    return _normalized(_last(x, dim[-1], inverse), count, normalization)


@lowers("stft")
def stft(
    x: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Any:
    """Transforms of overlapping frames: (..., frequencies, frames)."""
    frames = unfold(x, -1, n_fft, hop_length or n_fft // 4)
    width = win_length or n_fft
    if window is None:
        window = tf.ones([width], x.dtype)
    if width < n_fft:
        left = (n_fft - width) // 2
        window = tf.pad(window, [[left, n_fft - width - left]])
    frames = frames * cast(window, x.dtype)
    half = (not x.dtype.is_complex) if onesided is None else onesided
    y = tf.signal.rfft(frames) if half else tf.signal.fft(_complex(frames))
    y = _normalized(y, n_fft, int(normalized))
    y = tf.transpose(y, [*range(rank(y) - 2), rank(y) - 1, rank(y) - 2])
    return y if return_complex else view_as_real(y)


@lowers("view_as_real", "view_as_real_copy")
def view_as_real(x: Any) -> Any:
    return tf.stack([tf.math.real(x), tf.math.imag(x)], -1)


@lowers("view_as_complex", "view_as_complex_copy")
def view_as_complex(x: Any) -> Any:
    return tf.complex(x[..., 0], x[..., 1])


@lowers("complex")
def complex_of_parts(real: Any, imag: Any) -> Any:
    return tf.complex(real, imag)


@lowers("polar")
def polar(length: Any, angle: Any) -> Any:
    return tf.complex(length * tf.cos(angle), length * tf.sin(angle))


@lowers("real")
def real(x: Any) -> Any:
    return tf.math.real(x)


@lowers("imag")
def imag(x: Any) -> Any:
    return tf.math.imag(x)


@lowers("angle")
def angle(x: Any) -> Any:
    return tf.math.angle(x if x.dtype.is_complex or x.dtype.is_floating else tf.cast(x, tf.float32))


@lowers("_conj", "conj", "_conj_physical", "conj_physical", "_conj_copy")
def conj(x: Any) -> Any:
    return tf.math.conj(x) if x.dtype.is_complex else x


@lowers("resolve_conj", "resolve_neg")
def resolved(x: Any) -> Any:
    return x
