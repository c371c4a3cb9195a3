"""Convolutions over one, two or three spatial axes, transposed ones included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelport.exporters.lowering.operators.layout import channels_first, channels_last, reshape
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.lowering.sizes import product, shape, size, sizes
from modelport.exporters.lowering.weights import at_export
from modelport.exporters.runtime.tensorflow_runtime import tf

Ints = Sequence[int]


def spatial(values: int | Ints, axes: int) -> list[int]:
    """One value for each spatial axis; torch repeats a single one."""
    several = [values] if isinstance(values, int) else list(values)
    return several * axes if len(several) == 1 else several


@lowers("convolution")
def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> Any:
    """Convolve in channels-last layout; an axis of height one makes one dimension two."""
    if x.dtype.is_integer:  # exact: torch's integers wrap, but below 2**53 nothing is lost
        wide = [None if v is None else tf.cast(v, tf.float64) for v in (x, weight, bias)]
        y = convolution(*wide, stride, padding, dilation, transposed, output_padding, groups)
        return tf.cast(tf.round(y), x.dtype)
    axes = weight.shape.rank - 2
    stride, padding, dilation, output_padding = (
        spatial(values, axes) for values in (stride, padding, dilation, output_padding)
    )
    line = axes == 1
    if line:
        weight = at_export(tf.expand_dims, weight, 2)
        # Equal strides and dilations let depthwise kernels run; they do nothing at height one.
        stride, dilation = stride * 2, dilation * 2
        padding, output_padding = [0, *padding], [0, *output_padding]
        if transposed:
            stride, dilation = [1, stride[0]], [1, dilation[0]]
    y = tf.expand_dims(channels_last(x), 1) if line else channels_last(x)
    if not transposed:
        y = _convolve(y, weight, stride, [(p, p) for p in padding], dilation, groups)
    elif groups == 1 and set(dilation) == {1}:
        y = _transpose(y, weight, stride, padding, output_padding)
    else:
        y = _transpose_by_stuffing(y, weight, stride, padding, dilation, output_padding, groups)
    if bias is not None:
        y = tf.nn.bias_add(y, bias)
    return channels_first(tf.squeeze(y, 1) if line else y)


def _convolve(
    y: Any,
    weight: Any,
    stride: Ints,
    padding: list[tuple[int, int]],
    dilation: Ints,
    groups: int,
) -> Any:
    """Convolve a channels-last tensor with a weight in torch's layout (out, in, *kernel)."""
    axes = weight.shape.rank - 2
    if axes == 3:  # TensorFlow dilates no kernel here
        for axis, step in enumerate(dilation, start=2):
            weight = at_export(_stuff, weight, axis, step)
        dilation = [1] * axes
    if any(before < 0 or after < 0 for before, after in padding):
        y = y[(slice(None), *(slice(max(-a, 0), -max(-b, 0) or None) for a, b in padding))]
        padding = [(max(a, 0), max(b, 0)) for a, b in padding]
    kernel = at_export(_channels_last_kernel, weight)
    mode = _same_or_valid(stride, padding, dilation, weight.shape[2:])
    if mode == "PAD":
        y, mode = tf.pad(y, [[0, 0], *padding, [0, 0]]), "VALID"
    depthwise = groups > 1 and groups == y.shape[-1] and weight.shape[1] == 1
    if axes == 2 and depthwise and stride[0] == stride[1] and set(dilation) == {1}:
        kernel = at_export(_depthwise_kernel, weight, groups)
        return tf.nn.depthwise_conv2d(y, kernel, [1, *stride, 1], mode)
    if axes == 2:
        return tf.nn.conv2d(y, kernel, stride, mode, dilations=dilation)
    return tf.concat(
        [
            tf.nn.conv3d(part, filters, [1, *stride, 1], mode)
            for part, filters in zip(
                tf.split(y, groups, -1), tf.split(kernel, groups, -1), strict=True
            )
        ],
        -1,
    )


def _channels_last_kernel(weight: Any) -> Any:
    """(out, in, *kernel), or (in, out, *kernel) of a transposed one, as (*kernel, in, out)."""
    return tf.transpose(weight, [*range(2, weight.shape.rank), 1, 0])


def _depthwise_kernel(weight: Any, groups: int) -> Any:
    """(groups * factor, 1, *kernel) as (*kernel, groups, factor)."""
    factor = weight.shape[0] // groups
    return tf.reshape(_channels_last_kernel(weight), [*weight.shape[2:], groups, factor])


def _mirrored_kernel(weight: Any, groups: int) -> Any:
    """The kernel (out, in, *kernel) of a convolution that a transposed one amounts to."""
    given, wanted, *kernel = weight.shape
    for axis in range(2, weight.shape.rank):
        weight = tf.reverse(weight, [axis])
    weight = tf.reshape(weight, [groups, given // groups, wanted, *kernel])
    weight = tf.transpose(weight, [0, 2, 1, *range(3, weight.shape.rank)])
    return tf.reshape(weight, [groups * wanted, given // groups, *kernel])


def _same_or_valid(
    stride: Ints, padding: list[tuple[int, int]], dilation: Ints, kernel: Ints
) -> str:
    """TensorFlow's word for this padding, or ``PAD`` if it has none."""
    if all(pair == (0, 0) for pair in padding):
        return "VALID"
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    same = all(pair == (r / 2, r / 2) for pair, r in zip(padding, reach, strict=True))
    return "SAME" if same and set(stride) == {1} else "PAD"


def _transpose(y: Any, weight: Any, stride: Ints, padding: Ints, output_padding: Ints) -> Any:
    """TensorFlow's own transposed convolution, cropped by the padding."""
    axes = weight.shape.rank - 2
    kernel = at_export(_channels_last_kernel, weight)
    lengths = [(size(y, i + 1) - 1) * stride[i] + weight.shape[i + 2] for i in range(axes)]
    compute = tf.nn.conv2d_transpose if axes == 2 else tf.nn.conv3d_transpose
    whole = shape([size(y, 0), *lengths, weight.shape[1]])
    y = compute(y, kernel, whole, [1, *stride, 1], padding="VALID")
    extra = [max(o - p, 0) for o, p in zip(output_padding, padding, strict=True)]
    if any(extra):
        y = tf.pad(y, [[0, 0], *([0, e] for e in extra), [0, 0]])
    ends = [max(p - o, 0) for o, p in zip(output_padding, padding, strict=True)]
    if not any(padding):
        return y
    return y[(slice(None), *(slice(p, -e or None) for p, e in zip(padding, ends, strict=True)))]


def _transpose_by_stuffing(
    y: Any,
    weight: Any,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    output_padding: Ints,
    groups: int,
) -> Any:
    """A convolution of the input with zeros between its elements and the mirrored kernel.

    TensorFlow's transposed convolution knows neither groups nor dilation.
    """
    axes = weight.shape.rank - 2
    for axis, step in enumerate(stride, start=1):
        y = _stuff(y, axis, step)
    flipped = at_export(_mirrored_kernel, weight, groups)
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
    return _convolve(y, flipped, [1] * axes, pads, dilation, groups)


def _stuff(y: Any, axis: int, step: int) -> Any:
    """Put ``step - 1`` zeros between the elements of an axis."""
    if step == 1:
        return y
    lengths = sizes(y)
    rows = product(lengths[: axis + 1])
    columns = reshape(y, [rows, 1, product(lengths[axis + 1 :])])
    columns = tf.pad(columns, [[0, 0], [0, step - 1], [0, 0]])
    stuffed = [*lengths[:axis], lengths[axis] * step, *lengths[axis + 1 :]]
    y = reshape(columns, stuffed)
    keep = [slice(None)] * len(lengths)
    keep[axis] = slice(None, 1 - step)
    return y[tuple(keep)]
