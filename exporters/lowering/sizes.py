"""Sizes of tensors: ints where they are static, scalar int32 tensors where they are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from modelport.exporters.runtime.tensorflow_runtime import tf

Size = Any

#: An end of a slice that PyTorch writes for "to the last".
UNBOUNDED = 2**31 - 2


def rank(x: Any) -> int:
    """The number of dimensions, which is static in every program."""
    return int(x.shape.rank)


def axis(x: Any, dim: int, extra: int = 0) -> int:
    """``dim`` counted from the front; ``extra`` dimensions are about to be added."""
    total = rank(x) + extra
    return dim % total if total else 0


def axes(x: Any, dims: int | Sequence[int] | None) -> list[int]:
    """``dims`` counted from the front; all of them if it is None or empty.

    A scalar has none, though PyTorch lets one name its first or last.
    """
    if rank(x) == 0:
        return []
    if isinstance(dims, int):
        dims = [dims]
    return [axis(x, dim) for dim in dims] if dims else list(range(rank(x)))


def size(x: Any, dim: int) -> Size:
    """The size of one dimension; 1 if ``x`` has none."""
    if rank(x) == 0:
        return 1
    dim = axis(x, dim)
    static = x.shape[dim]
    return tf.shape(x)[dim] if static is None else int(static)


def sizes(x: Any) -> list[Size]:
    """The sizes of all dimensions."""
    return [size(x, dim) for dim in range(rank(x))]


def is_static(sizes: Iterable[Size]) -> bool:
    """Whether every size is known."""
    return all(isinstance(each, int) for each in sizes)


def scalar(value: Size, dtype: Any = None) -> Any:
    """A size as a scalar tensor, of int32 by default."""
    return tf.cast(value, dtype or tf.int32)


def shape(sizes: Sequence[Size]) -> Any:
    """``sizes`` as TensorFlow takes them: a list if all are static, else one int32 tensor."""
    if is_static(sizes):
        return [int(each) for each in sizes]
    return tf.stack([scalar(each) for each in sizes])


def static_shape(sizes: Sequence[Size]) -> Any:
    """The part of ``sizes`` that is known, for ``set_shape``."""
    return tf.TensorShape([each if isinstance(each, int) else None for each in sizes])


def product(sizes: Iterable[Size]) -> Size:
    """The number of elements in ``sizes``; static factors are multiplied at export."""
    static, symbolic = 1, None
    for each in sizes:
        if isinstance(each, int):
            static *= each
        else:
            symbolic = each if symbolic is None else symbolic * each
    if symbolic is None:
        return static
    return symbolic if static == 1 else symbolic * static
