"""Pooling over windows: maximum, average, and their adaptive forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from modelport.exporters.lowering.operators.convolution import spatial
from modelport.exporters.lowering.operators.layout import channels_first, channels_last, reshape
from modelport.exporters.lowering.operators.scattering import put_rows
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.lowering.sizes import Size, is_static, product, rank, shape, size, sizes
from modelport.exporters.runtime.tensorflow_runtime import tf

Ints = int | Sequence[int]


class Window(NamedTuple):
    """The windows along one spatial axis."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    ceil_mode: bool

    def count(self, length: Size) -> Size:
        """The number of windows over ``length`` elements."""
        rest = length + 2 * self.padding - self.dilation * (self.kernel - 1) - 1
        if not self.ceil_mode:
            return rest // self.stride + 1
        count = -(-rest // self.stride) + 1
        # A window that would begin behind the data and its padding is left out.
        late = (count - 1) * self.stride >= length + self.padding
        return count - (int(late) if isinstance(late, bool) else tf.cast(late, tf.int32))

    def behind(self, length: Size) -> Size:
        """The padding behind the data that the last window needs."""
        if not self.ceil_mode:
            return self.padding
        reach = (self.count(length) - 1) * self.stride + self.dilation * (self.kernel - 1) + 1
        missing = reach - length - self.padding
        return max(missing, 0) if isinstance(missing, int) else tf.maximum(missing, 0)


def _windows(
    dims: int, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool
) -> list[Window]:
    columns = [spatial(v, dims) for v in (kernel, stride or kernel, padding, dilation)]
    return [Window(k, s, p, d, ceil_mode) for k, s, p, d in zip(*columns, strict=True)]


def _padded(y: Any, windows: list[Window], value: Any) -> Any:
    """A channels-last ``y`` in which every window lies inside."""
    pads = [[w.padding, w.behind(size(y, i))] for i, w in enumerate(windows, start=1)]
    if not any(pad for pair in pads for pad in pair if isinstance(pad, int)) and all(
        is_static(pair) for pair in pads
    ):
        return y
    pads = [[0, 0], *pads, [0, 0]]
    whole = pads if all(map(is_static, pads)) else tf.stack([tf.stack(pair) for pair in pads])
    return tf.pad(y, whole, constant_values=tf.constant(value, y.dtype))


def _lowest(dtype: Any) -> Any:
    return float("-inf") if dtype.is_floating else dtype.min


def _with_batch(dims: int, pool: Callable[[Any], Any], x: Any) -> Any:
    """``pool`` of ``x``, which may lack its batch axis."""
    if rank(x) == dims + 2:
        return pool(x)
    result = pool(tf.expand_dims(x, 0))
    return tf.nest.map_structure(lambda part: tf.squeeze(part, 0), result)


def _two_dimensional(y: Any, windows: list[Window], compute: Callable[..., Any]) -> Any:
    """Pool a padded channels-last ``y`` with TensorFlow's pooling of two dimensions.

    TFLite has none of three: the first axis follows after the other two, since a window is a
    product of intervals.
    """
    kernels, strides = [w.kernel for w in windows], [w.stride for w in windows]
    if len(windows) == 1:
        y = compute(tf.expand_dims(y, 1), [1, *kernels], [1, *strides], "VALID")
        return tf.squeeze(y, 1)
    if len(windows) == 2:
        return compute(y, kernels, strides, "VALID")
    batch, depth, height, width, channels = sizes(y)
    planes = reshape(y, [-1, height, width, channels])
    planes = compute(planes, kernels[1:], strides[1:], "VALID")
    height, width = sizes(planes)[1:3]
    columns = reshape(planes, [batch, depth, height * width, channels])
    columns = compute(columns, [kernels[0], 1], [strides[0], 1], "VALID")
    return reshape(columns, [batch, size(columns, 1), height, width, channels])


def _taps(y: Any, windows: list[Window]) -> list[tuple[tuple[int, ...], Any]]:
    """Each place in a window with the elements of a padded ``y`` there, in row-major order."""
    counts = [
        (size(y, i) - w.dilation * (w.kernel - 1) - 1) // w.stride + 1
        for i, w in enumerate(windows, start=1)
    ]
    taps: list[tuple[tuple[int, ...], Any]] = [((), y)]
    for dim, (window, count) in enumerate(zip(windows, counts, strict=True), start=1):
        steps = [
            slice(start, start + (count - 1) * window.stride + 1, window.stride)
            for start in range(0, window.dilation * window.kernel, window.dilation)
        ]
        lead = (slice(None),) * dim
        taps = [
            ((*place, i), part[(*lead, step)])
            for place, part in taps
            for i, step in enumerate(steps)
        ]
    return taps


def _max_pool(x: Any, windows: list[Window]) -> Any:
    y = _padded(channels_last(x), windows, _lowest(x.dtype))
    if x.dtype.is_floating and all(w.dilation == 1 for w in windows):
        return channels_first(_two_dimensional(y, windows, tf.nn.max_pool2d))
    # One axis at a time: a window is a product of intervals.
    for dim, window in enumerate(windows, start=1):
        along = [Window(1, 1, 0, 1, False)] * (dim - 1) + [window]
        (_, best), *others = _taps(y, along)
        for _, part in others:
            best = tf.maximum(best, part)
        y = best
    return channels_first(y)


def _max_pool_with_indices(x: Any, windows: list[Window]) -> tuple[Any, Any]:
    """The maximum of each window, and the index of its first occurrence in the plane."""
    y = channels_last(x)
    lengths = sizes(y)[1:-1]
    taps = _taps(_padded(y, windows, _lowest(x.dtype)), windows)
    best = place = None
    for offsets, part in taps:
        here, inside = _index_of_tap(part, offsets, windows, lengths)
        if best is None:
            best, place = part, tf.broadcast_to(here, tf.shape(part))
            first_inside = inside
        else:
            better = (part > best) | (tf.logical_not(first_inside) & inside)
            best, place = tf.where(better, part, best), tf.where(better, here, place)
            first_inside = first_inside | inside
    return channels_first(best), channels_first(tf.cast(place, tf.int64))


def _index_of_tap(
    part: Any, offsets: Sequence[int], windows: list[Window], lengths: list[Size]
) -> tuple[Any, Any]:
    """The indices in the plane of one tap's elements, and which are not padding."""
    dims = len(windows)
    index: Any = 0
    inside: Any = True
    for i, (offset, window) in enumerate(zip(offsets, windows, strict=True)):
        along = tf.range(size(part, i + 1)) * window.stride
        along = along + (offset * window.dilation - window.padding)
        along = tf.reshape(along, [-1 if j == i + 1 else 1 for j in range(dims + 2)])
        index = index * lengths[i] + along
        inside = (along >= 0) & (along < lengths[i]) & inside
    return index, inside


def _register_max(dims: int) -> None:
    """The maximum over ``dims`` axes: alone, and with indices."""

    def windows(
        kernel: Ints, stride: Ints = (), padding: Ints = 0, dilation: Ints = 1, ceil: bool = False
    ) -> list[Window]:
        return _windows(dims, kernel, stride, padding, dilation, ceil)

    @lowers(f"max_pool{dims}d")
    def maximum(x: Any, *arguments: Any, **keywords: Any) -> Any:
        found = windows(*arguments, **keywords)
        return _with_batch(dims, lambda y: _max_pool(y, found), x)

    @lowers(f"max_pool{dims}d_with_indices")
    def maximum_with_indices(x: Any, *arguments: Any, **keywords: Any) -> Any:
        found = windows(*arguments, **keywords)
        return _with_batch(dims, lambda y: _max_pool_with_indices(y, found), x)


def _avg_pool(x: Any, windows: list[Window], count_include_pad: bool, divisor: int | None) -> Any:
    if x.dtype.is_integer:
        mean = _avg_pool(tf.cast(x, tf.float64), windows, count_include_pad, divisor)
        return tf.cast(mean + tf.sign(mean) * 1e-9, x.dtype)  # a whole mean may come out less
    y = channels_last(x)
    lengths = sizes(y)[1:-1]
    y = _two_dimensional(_padded(y, windows, 0), windows, tf.nn.avg_pool2d)
    volume = 1
    for window in windows:
        volume *= window.kernel
    if divisor is not None:
        return channels_first(y * tf.constant(volume / divisor, y.dtype))
    for i, (window, length) in enumerate(zip(windows, lengths, strict=True), start=1):
        if window.ceil_mode or (window.padding and not count_include_pad):
            share = window.kernel / _counted(window, length, count_include_pad)
            share = tf.reshape(share, [-1 if j == i else 1 for j in range(rank(y))])
            y = y * tf.cast(share, y.dtype)
    return channels_first(y)


def _counted(window: Window, length: Size, count_include_pad: bool) -> Any:
    """The number of elements in each window that count."""
    margin = window.padding if count_include_pad else 0
    start = tf.range(window.count(length)) * window.stride - window.padding
    end = tf.minimum(start + window.kernel, length + margin)
    return tf.cast(end - tf.maximum(start, -margin), tf.float64)


def _register_average(dims: int) -> None:
    @lowers(f"avg_pool{dims}d")
    def average(
        x: Any,
        kernel_size: Ints,
        stride: Ints = (),
        padding: Ints = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        windows = _windows(dims, kernel_size, stride, padding, 1, ceil_mode)
        return _with_batch(
            dims, lambda y: _avg_pool(y, windows, count_include_pad, divisor_override), x
        )


def _bins(length: Size, wanted: Size) -> tuple[Any, Any]:
    """The begin and end of each of the ``wanted`` bins over ``length`` elements."""
    number = tf.range(wanted)
    return number * length // wanted, -(-(number + 1) * length // wanted)


def _is_in_bin(length: Size, wanted: Size) -> Any:
    """A matrix (wanted, length): whether an element is in a bin."""
    begin, end = _bins(length, wanted)
    position = tf.range(length)[tf.newaxis]
    return (position >= begin[:, tf.newaxis]) & (position < end[:, tf.newaxis])


def _adaptive_avg_pool(x: Any, wanted: Sequence[Size]) -> Any:
    first = rank(x) - len(wanted)
    for i, target in enumerate(wanted, start=first):
        length = size(x, i)
        if isinstance(target, int) and target == 1:
            x = tf.reduce_mean(x, i, keepdims=True)
        elif isinstance(target, int) and isinstance(length, int) and length % target == 0:
            lengths = sizes(x)
            split = [*lengths[:i], target, length // target, *lengths[i + 1 :]]
            x = tf.reduce_mean(reshape(x, split), i + 1)
        else:
            member = tf.cast(_is_in_bin(length, target), x.dtype)
            member = member / tf.reduce_sum(member, 1, keepdims=True)
            x = _product_along(x, i, member)
    return x


def _product_along(x: Any, dim: int, matrix: Any) -> Any:
    """The product of ``matrix`` with the vectors along ``dim``."""
    order = [i for i in range(rank(x)) if i != dim]
    moved = tf.transpose(x, [*order, dim])
    lengths = sizes(moved)
    y = tf.matmul(reshape(moved, [-1, lengths[-1]]), matrix, transpose_b=True)
    y = reshape(y, [*lengths[:-1], size(y, 1)])
    back = list(range(rank(x) - 1))
    back.insert(dim, rank(x) - 1)
    return tf.transpose(y, back)


def _register_adaptive_average(dims: int) -> None:
    @lowers(f"adaptive_avg_pool{dims}d", *([f"_adaptive_avg_pool{dims}d"] if dims > 1 else []))
    def average(x: Any, output_size: Sequence[Size]) -> Any:
        return _adaptive_avg_pool(x, spatial(output_size, dims))


def _adaptive_max_pool(x: Any, wanted: Sequence[Size]) -> tuple[Any, Any]:
    """The maximum of each bin and the index of its first occurrence, last axis first."""
    values: Any = x
    index: Any = None
    for back, target in enumerate(reversed(wanted), start=1):
        dim = rank(x) - back
        length = size(values, dim)
        order = [*(i for i in range(rank(x)) if i != dim), dim]
        moved = tf.expand_dims(tf.transpose(values, order), -2)  # (..., 1, length)
        member = _is_in_bin(length, target)
        inside = tf.where(member, moved, tf.constant(_lowest(x.dtype), x.dtype))
        chosen = tf.argmax(inside, -1, output_type=tf.int32)  # (..., target)
        # The first element of a bin stands for one in which nothing exceeds the lowest number.
        chosen = tf.maximum(chosen, _bins(length, target)[0])
        lead = rank(x) - 1
        places = [*range(lead)]
        places.insert(dim, lead)
        values = tf.transpose(tf.reduce_max(inside, -1), places)
        along = tf.transpose(chosen, places)
        if index is None:
            index = along
        else:
            below = tf.transpose(index, order)
            below = tf.gather(below, chosen, axis=lead, batch_dims=lead)
            index = along * product(sizes(x)[dim + 1 :]) + tf.transpose(below, places)
    return values, tf.cast(index, tf.int64)


def _register_adaptive_max(dims: int) -> None:
    @lowers(f"adaptive_max_pool{dims}d")
    def maximum(x: Any, output_size: Sequence[Size]) -> Any:
        return _adaptive_max_pool(x, spatial(output_size, dims))


for _dims in (1, 2, 3):
    _register_max(_dims)
    _register_average(_dims)
    _register_adaptive_average(_dims)
    _register_adaptive_max(_dims)


@lowers("max_unpool2d")
def max_unpool2d(x: Any, indices: Any, output_size: Sequence[Size]) -> Any:
    """Put each element of ``x`` where it was before pooling; zeros elsewhere."""
    lengths = sizes(x)
    planes, area = product(lengths[:-2]), product(output_size)
    number = reshape(tf.cast(indices, tf.int32), [planes, product(lengths[-2:])])
    number = number + (tf.range(planes) * area)[:, tf.newaxis]
    empty = tf.zeros(shape([planes * area]), x.dtype)
    flat = put_rows(empty, tf.reshape(number, [-1]), tf.reshape(x, [-1]))
    return reshape(flat, [*lengths[:-2], *output_size])
