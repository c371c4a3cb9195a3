"""Padding with a constant, with the reflection and with the edge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelport.exporters.lowering.datatypes import cast
from modelport.exporters.lowering.operators.layout import reshape
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.lowering.sizes import Size, is_static, rank, scalar, size
from modelport.exporters.runtime.tensorflow_runtime import tf


def _margins(x: Any, pad: Sequence[Size]) -> list[tuple[Size, Size]]:
    """(before, after) of each dimension; PyTorch counts from the last."""
    pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    return [(0, 0)] * (rank(x) - len(pairs)) + pairs


def padded(x: Any, margins: Sequence[tuple[Size, Size]], value: Any = 0) -> Any:
    """``x`` with a constant around it; negative margins cut off."""
    x, margins = _cropped(x, margins)
    if all(isinstance(m, int) and m == 0 for pair in margins for m in pair):
        return x
    wide = tf.pad(x, _stacked(margins), constant_values=cast(value, x.dtype))
    if all(is_static(pair) for pair in margins):
        return wide
    # TFLite's converter takes no size of this result for known, and convolves known channels alone.
    known = [
        x.shape[dim] + before + after
        if is_static((before, after)) and x.shape[dim] is not None
        else size(wide, dim)
        for dim, (before, after) in enumerate(margins)
    ]
    return reshape(wide, known)


def _cropped(x: Any, margins: Sequence[tuple[Size, Size]]) -> tuple[Any, Any]:
    """``x`` without what negative margins cut off, and the other margins."""
    if not any(isinstance(m, int) and m < 0 for pair in margins for m in pair):
        return x, margins
    parts = [slice(_cut(before), _cut(after, end=True)) for before, after in margins]
    return x[tuple(parts)], [(_added(before), _added(after)) for before, after in margins]


def _cut(margin: Size, end: bool = False) -> Size | None:
    if not isinstance(margin, int) or margin >= 0:
        return None
    return margin if end else -margin


def _added(margin: Size) -> Size:
    return max(0, margin) if isinstance(margin, int) else margin


def _stacked(margins: Sequence[tuple[Size, Size]]) -> Any:
    if all(is_static(pair) for pair in margins):
        return [list(pair) for pair in margins]
    return tf.stack([tf.stack([scalar(before), scalar(after)]) for before, after in margins])


@lowers("constant_pad_nd")
def constant_pad_nd(x: Any, pad: Sequence[Size], value: Any = 0) -> Any:
    return padded(x, _margins(x, pad), value)


@lowers("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def reflection_pad(x: Any, pad: Sequence[Size]) -> Any:
    x, margins = _cropped(x, _margins(x, pad))
    return tf.pad(x, _stacked(margins), "REFLECT")


@lowers("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replication_pad(x: Any, pad: Sequence[Size]) -> Any:
    for dim, (before, after) in enumerate(_margins(x, pad)):
        if isinstance(before, int) and isinstance(after, int) and not before and not after:
            continue
        length = size(x, dim)
        places = tf.range(-scalar(before), scalar(length) + scalar(after))
        x = tf.gather(x, tf.clip_by_value(places, 0, scalar(length) - 1), axis=dim)
    return x
