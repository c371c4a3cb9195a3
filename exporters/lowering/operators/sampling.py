"""Sampling of images and volumes at given points: ``grid_sample`` and ``affine_grid``."""

from __future__ import annotations

from itertools import product
from typing import Any

from modelport.exporters.lowering.operators.interpolation import cubic_weights
from modelport.exporters.lowering.operators.layout import channels_first, channels_last, reshape
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.lowering.sizes import Size, shape, size, sizes
from modelport.exporters.runtime.tensorflow_runtime import tf

ZEROS, BORDER, REFLECTION = range(3)
LINEAR, NEAREST, CUBIC = range(3)


def _place(coordinate: Any, length: Any, align_corners: bool) -> Any:
    """The element that a coordinate in -1..1 means."""
    if align_corners:
        return (coordinate + 1) / 2 * (length - 1)
    return ((coordinate + 1) * length - 1) / 2


def _reflected(place: Any, length: Any, align_corners: bool) -> Any:
    """``place`` mirrored at the edges until it lies inside."""
    low, span = (0.0, length - 1) if align_corners else (-0.5, length)
    span = tf.maximum(span, 1e-12)
    distance = tf.abs(place - low)
    flips = tf.floor(distance / span)
    rest = distance - flips * span
    even = tf.equal(tf.math.floormod(flips, 2), 0)
    return tf.where(even, rest, span - rest) + low


def _moved_inside(place: Any, length: Any, padding: int, align_corners: bool) -> Any:
    if padding == REFLECTION:
        place = _reflected(place, length, align_corners)
    if padding != ZEROS:
        place = tf.minimum(tf.maximum(place, 0), length - 1)
    return place


def _read(y: Any, places: list[Any], lengths: list[Size]) -> Any:
    """The elements of a channels-last ``y`` at whole ``places``; zeros outside."""
    inside: Any = True
    flat: Any = 0
    for place, length in zip(places, lengths, strict=True):
        number = tf.cast(length, place.dtype)
        inside = (place >= 0) & (place < number) & inside
        index = tf.cast(tf.minimum(tf.maximum(place, 0), number - 1), tf.int32)
        flat = flat * length + index
    batch, *_, channels = sizes(y)
    area: Size = 1
    for length in lengths:
        area = area * length
    rows = reshape(y, [batch, area, channels])
    picked = tf.gather(rows, flat, axis=1, batch_dims=1)
    return tf.where(inside[..., tf.newaxis], picked, tf.zeros([], y.dtype))


@lowers("grid_sampler_2d", "grid_sampler_3d", "grid_sampler")
def grid_sampler(
    x: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Any:
    """Sample ``x`` at the points of ``grid``, whose last axis names the last axis first."""
    y = channels_last(x)
    lengths = sizes(y)[1:-1]
    dims = len(lengths)
    measures = [tf.cast(length, grid.dtype) for length in lengths]
    places = [_place(grid[..., dims - 1 - i], measures[i], align_corners) for i in range(dims)]

    def inside(place: Any, i: int) -> Any:
        return _moved_inside(place, measures[i], padding_mode, align_corners)

    if interpolation_mode == NEAREST:
        whole = [tf.round(inside(place, i)) for i, place in enumerate(places)]
        return channels_first(_read(y, whole, lengths))
    if interpolation_mode == LINEAR:
        places = [inside(place, i) for i, place in enumerate(places)]
    taps = []  # for each axis: places of the neighbours and their weights
    for i, place in enumerate(places):
        low = tf.floor(place)
        share = place - low
        if interpolation_mode == LINEAR:
            taps.append([(low, 1 - share), (low + 1, share)])
        else:
            weights = cubic_weights(share)
            taps.append([(inside(low + n, i), w) for n, w in enumerate(weights, start=-1)])
    total: Any = 0
    for corner in product(*taps):
        weight: Any = 1
        for _, each in corner:
            weight = weight * each
        total = total + _read(y, [place for place, _ in corner], lengths) * weight[..., tf.newaxis]
    return channels_first(total)


@lowers("affine_grid_generator")
def affine_grid_generator(theta: Any, wanted: list[Size], align_corners: bool) -> Any:
    """The points of an image of ``wanted`` sizes after the affine maps ``theta``."""
    lengths = wanted[2:]
    dims = len(lengths)
    axes = []
    for i, length in enumerate(lengths):
        number = tf.cast(tf.range(length), theta.dtype)
        count = tf.cast(length, theta.dtype)
        if align_corners:
            along = number * 2 / tf.maximum(count - 1, 1) - tf.cast(count > 1, theta.dtype)
        else:
            along = (number * 2 + 1) / count - 1
        along = tf.reshape(along, [-1 if j == i else 1 for j in range(dims)])
        axes.append(tf.broadcast_to(along, shape(lengths)))
    points = tf.stack([*reversed(axes), tf.ones_like(axes[0])], -1)
    points = reshape(points, [1, -1, dims + 1])
    moved = tf.matmul(tf.tile(points, shape([size(theta, 0), 1, 1])), theta, transpose_b=True)
    return reshape(moved, [size(theta, 0), *lengths, dims])
