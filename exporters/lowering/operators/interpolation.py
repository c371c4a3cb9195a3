"""Resizing of images and other grids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from modelport.exporters.lowering.operators.layout import channels_first, channels_last
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.lowering.sizes import Size, rank, scalar, shape, sizes
from modelport.exporters.runtime.tensorflow_runtime import tf


class Resize(NamedTuple):
    """The resizing of one axis.

    Attributes:
        factor: what the caller multiplies the size by; None if they gave the size alone.
        dtype: the datatype that places are computed in.
    """

    length: Size
    wanted: Size
    factor: float | None
    align_corners: bool
    dtype: Any

    @property
    def ratio(self) -> Any:
        """The distance of two samples, in elements of the input."""
        length, wanted = self.length, self.wanted
        if self.align_corners:
            if isinstance(wanted, int) and wanted <= 1:
                return 0.0
            length, wanted = length - 1, wanted - 1
        elif self.factor:
            return 1.0 / self.factor
        if isinstance(length, int) and isinstance(wanted, int):
            return length / wanted
        return tf.cast(length, self.dtype) / tf.cast(tf.maximum(wanted, 1), self.dtype)

    @property
    def is_plain(self) -> bool:
        """Whether the ratio is that of the sizes."""
        if not self.factor or self.align_corners or float(self.factor).is_integer():
            return True
        known = isinstance(self.length, int) and isinstance(self.wanted, int)
        return known and bool(self.length * self.factor == self.wanted)

    def samples(self) -> Any:
        """The number of each sample."""
        return tf.cast(tf.range(scalar(self.wanted)), self.dtype)

    def places(self) -> Any:
        """The place of each sample in the input, in elements."""
        if self.align_corners:
            return self.samples() * self.ratio
        return (self.samples() + 0.5) * self.ratio - 0.5

    def inside(self, place: Any) -> Any:
        """The element at ``place``, or the nearest at the edge."""
        return tf.clip_by_value(tf.cast(place, tf.int32), 0, self.length - 1)


Method = Callable[[Any, list[Resize]], Any]


def _along(vector: Any, y: Any, dim: int) -> Any:
    """``vector`` in the datatype of ``y`` and in a shape that broadcasts along ``dim``."""
    return tf.reshape(tf.cast(vector, y.dtype), [-1 if d == dim else 1 for d in range(rank(y))])


def _built_in(y: Any, resizes: list[Resize], compute: Callable[..., Any], **how: bool) -> Any:
    """Resize a channels-last image with TensorFlow's operator."""
    wanted = tf.stack(shape([each.wanted for each in resizes]))
    return channels_first(compute(images=y, size=wanted, **how))


def _nearest(x: Any, resizes: list[Resize], exact: bool = False) -> Any:
    y = channels_last(x)
    plain = len(resizes) == 2 and all(each.is_plain for each in resizes) and not exact
    if plain and x.dtype in (tf.float32, tf.uint8, tf.int8):
        return _built_in(y, resizes, tf.raw_ops.ResizeNearestNeighbor)
    for dim, each in enumerate(resizes, start=1):
        place = tf.floor((each.samples() + 0.5 * exact) * each.ratio)
        y = tf.gather(y, each.inside(place), axis=dim)
    return channels_first(y)


def _nearest_exact(x: Any, resizes: list[Resize]) -> Any:
    return _nearest(x, resizes, exact=True)


def _linear(x: Any, resizes: list[Resize]) -> Any:
    y = channels_last(x)
    if len(resizes) == 2 and x.dtype == tf.float32 and all(each.is_plain for each in resizes):
        align = resizes[0].align_corners
        how = {"align_corners": align, "half_pixel_centers": not align}
        return _built_in(y, resizes, tf.raw_ops.ResizeBilinear, **how)
    for dim, each in enumerate(resizes, start=1):
        place = tf.maximum(each.places(), 0)
        low = each.inside(place)
        share = _along(place - tf.cast(low, place.dtype), y, dim)
        below, above = (tf.gather(y, each.inside(at), axis=dim) for at in (low, low + 1))
        y = below * (1 - share) + above * share
    return channels_first(y)


def cubic_weights(t: Any, a: float = -0.75) -> list[Any]:
    """Weights of the four neighbours of a point that lies ``t`` behind the second of them."""

    def near(d: Any) -> Any:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Any) -> Any:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _cubic(x: Any, resizes: list[Resize]) -> Any:
    y = channels_last(x)
    for dim, each in enumerate(resizes, start=1):
        low = tf.floor(each.places())
        total: Any = 0
        for tap, weight in enumerate(cubic_weights(each.places() - low), start=-1):
            near = tf.gather(y, each.inside(low + tap), axis=dim)
            total = total + near * _along(weight, y, dim)
        y = total
    return channels_first(y)


def _triangle(distance: Any) -> Any:
    return tf.nn.relu(1 - distance)


def _keys(distance: Any) -> Any:
    """The cubic filter of Keys, with the parameter that PyTorch smooths with."""
    near, far = cubic_weights(distance, -0.5)[1], cubic_weights(distance - 1, -0.5)[0]
    return tf.where(distance < 1, near, tf.where(distance < 2, far, 0))


def _smoothed(x: Any, resizes: list[Resize], kernel: Callable[[Any], Any], support: float) -> Any:
    """Resize with a filter that grows with the ratio, so that nothing is skipped."""
    for dim, each in enumerate(resizes, start=2):
        ratio = tf.cast(each.ratio, each.dtype)
        spread = tf.maximum(ratio, 1)
        centre = (each.samples()[:, tf.newaxis] + 0.5) * ratio
        place = tf.cast(tf.range(scalar(each.length)), each.dtype)[tf.newaxis]
        first = tf.floor(centre - support * spread + 0.5)
        last = tf.floor(centre + support * spread + 0.5)
        weight = kernel(tf.abs((place - centre + 0.5) / spread))
        weight = tf.where((place >= first) & (place < last), weight, 0)
        weight = tf.cast(weight / tf.reduce_sum(weight, 1, keepdims=True), x.dtype)
        last_axis = dim == rank(x) - 1
        x = tf.matmul(x, weight, transpose_b=True) if last_axis else tf.matmul(weight, x)
    return x


def _smoothed_linear(x: Any, resizes: list[Resize]) -> Any:
    return _smoothed(x, resizes, _triangle, 1.0)


def _smoothed_cubic(x: Any, resizes: list[Resize]) -> Any:
    return _smoothed(x, resizes, _keys, 2.0)


def _register(name: str, method: Method, has_corners: bool) -> None:
    """Register a method by its two signatures: sizes and factors together, or either."""

    def resize(x: Any, wanted: Sequence[Size], factors: Sequence[Any], align: bool) -> Any:
        columns = zip(sizes(x)[2:], wanted, factors, strict=True)
        dtype = tf.float64 if x.dtype == tf.float64 else tf.float32
        return method(x, [Resize(*column, align, dtype) for column in columns])

    @lowers(name)
    def by_size(x: Any, output_size: Sequence[Size], *rest: Any, **scales: Any) -> Any:
        corners = bool(has_corners and rest[0])
        factors = [*rest[has_corners:], *scales.values()]
        factors += [None] * (len(output_size) - len(factors))
        return resize(x, output_size, factors, corners)

    @lowers(f"{name}.vec")
    def by_size_or_factor(x: Any, output_size: Sequence[Size] | None, *rest: Any) -> Any:
        corners = bool(has_corners and rest[0])
        factors = rest[-1]
        if output_size is not None:
            return resize(x, output_size, [None] * len(output_size), corners)
        lengths = sizes(x)[2:]
        wanted = [_scaled(n, f) for n, f in zip(lengths, factors, strict=True)]
        return resize(x, wanted, factors, corners)


def _scaled(length: Size, factor: float) -> Size:
    """``length`` times ``factor``, rounded down."""
    if isinstance(length, int) or float(factor).is_integer():
        return int(length * factor) if isinstance(length, int) else length * int(factor)
    return tf.cast(tf.floor(tf.cast(length, tf.float32) * factor), tf.int32)


for _dims, _word in ((1, "linear1d"), (2, "bilinear2d"), (3, "trilinear3d")):
    _register(f"upsample_nearest{_dims}d", _nearest, False)
    _register(f"_upsample_nearest_exact{_dims}d", _nearest_exact, False)
    _register(f"upsample_{_word}", _linear, True)
_register("upsample_bicubic2d", _cubic, True)
_register("_upsample_bilinear2d_aa", _smoothed_linear, True)
_register("_upsample_bicubic2d_aa", _smoothed_cubic, True)
