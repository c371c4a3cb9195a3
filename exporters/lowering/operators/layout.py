"""The layout of tensors: shapes, and where the channels are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from modelport.exporters.lowering.registry import Lowering
from modelport.exporters.lowering.sizes import Size, rank, shape, sizes
from modelport.exporters.runtime.tensorflow_runtime import tf


def reshape(x: Any, lengths: Sequence[Size]) -> Any:
    """``x`` in another shape; at most one size is -1.

    A single size that is known only at run time follows from the others. So the shape is constant,
    and TFLite's converter still sees the static sizes.
    """
    symbolic = [length for length in lengths if not isinstance(length, int)]
    known = [length for length in lengths if isinstance(length, int)]
    if len(symbolic) == 1 and -1 not in known and 0 not in known:
        lengths = [length if isinstance(length, int) else -1 for length in lengths]
    return tf.reshape(x, shape(lengths))


def channels_last(x: Any) -> Any:
    """Move the channels of ``x``, its second axis, behind the others.

    A transpose that put them there is undone instead, so that none lies between two layers.
    """
    found = _operand(x, _to_front(rank(x)))
    return tf.transpose(x, [0, *range(2, rank(x)), 1]) if found is None else found


def channels_first(x: Any) -> Any:
    """Move the channels of ``x``, its last axis, to the second place."""
    return tf.transpose(x, _to_front(rank(x)), name=_CHANNELS_FIRST)


_CHANNELS_FIRST = "channels_first"


def _to_front(dimensions: int) -> list[int]:
    return [0, dimensions - 1, *range(1, dimensions - 1)]


def _order(x: Any) -> list[int] | None:
    """The order of the transpose that ``x`` is the result of; None if it is of something else."""
    if not tf.is_symbolic_tensor(x) or x.op.type != "Transpose":
        return None
    order = tf.get_static_value(x.op.inputs[1])
    return None if order is None else [int(dim) for dim in order]


def _operand(x: Any, order: list[int]) -> Any:
    """The tensor whose transpose in ``order`` is ``x``; None if there is none."""
    return x.op.inputs[0] if _order(x) == order else None


def channels_last_operand(x: Any) -> Any:
    """The tensor that `channels_first` made ``x`` of; None if it did not."""
    found = _operand(x, _to_front(rank(x))) if rank(x) > 2 else None
    return found if found is not None and _CHANNELS_FIRST in x.op.name else None


def transpose(x: Any, order: Sequence[int]) -> Any:
    """``x`` transposed; two transposes in a row become one or none."""
    if (before := _order(x)) is not None:
        x, order = x.op.inputs[0], [before[dim] for dim in order]
    return x if list(order) == list(range(rank(x))) else tf.transpose(x, list(order))


# Elementwise operators, reductions, concatenation and padding compute below `channels_first`: they
# take its operand and put the transpose behind themselves, where the next layer undoes it.


def elementwise(function: Lowering) -> Lowering:
    """``function``, which computes each element by itself, in the layout of its operands."""

    @wraps(function)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in args if tf.is_tensor(x)]
        dims = max((rank(x) for x in tensors), default=0)
        if all(channels_last_operand(x) is None for x in tensors):
            return function(*args, **kwargs)
        below = {id(x): _below(x, dims) for x in tensors}
        if any(x is None for x in below.values()):
            return function(*args, **kwargs)
        return channels_first(function(*(below.get(id(x), x) for x in args), **kwargs))

    return lowered


def _below(x: Any, dims: int) -> Any:
    """``x`` for an operation on channels-last tensors of ``dims`` dimensions.

    None if it were to be transposed for that.
    """
    if rank(x) == dims and (found := channels_last_operand(x)) is not None:
        return found
    if rank(x) == 0:
        return x
    lengths = [*[1] * (dims - rank(x)), *sizes(x)]
    if any(length != 1 for length in lengths[2:] if isinstance(length, int)):
        return None
    if not all(isinstance(length, int) for length in lengths[2:]):
        return None
    return reshape(x, [lengths[0], *lengths[2:], lengths[1]])


def reduction(function: Lowering) -> Lowering:
    """``function``, which takes dimensions to reduce and whether to keep them."""

    @wraps(function)
    def lowered(x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        below = channels_last_operand(x)
        if below is None or not dim:
            return function(x, dim, keepdim, **kwargs)
        dims = [each % rank(x) for each in ([dim] if isinstance(dim, int) else dim)]
        moved = [_moved(each, rank(x)) for each in dims]
        if keepdim:
            return channels_first(function(below, moved, True, **kwargs))
        if sorted(dims) == list(range(2, rank(x))):
            return function(below, moved, False, **kwargs)
        return function(x, dim, keepdim, **kwargs)

    return lowered


def _moved(dim: int, dims: int) -> int:
    """The place of a channels-first tensor's dimension in the channels-last one."""
    return 0 if dim == 0 else dims - 1 if dim == 1 else dim - 1


def concatenation(function: Lowering) -> Lowering:
    """``function``, which joins tensors along a dimension."""

    @wraps(function)
    def lowered(tensors: Sequence[Any], dim: int = 0) -> Any:
        below = [channels_last_operand(x) for x in tensors]
        if any(x is None for x in below):
            return function(tensors, dim)
        dims = rank(tensors[0])
        return channels_first(function(below, _moved(dim % dims, dims)))

    return lowered


def padding(function: Lowering) -> Lowering:
    """``function``, which pads the last dimensions, given from the last on."""

    @wraps(function)
    def lowered(x: Any, pad: Sequence[Size], *rest: Any) -> Any:
        below = channels_last_operand(x)
        if below is None or len(pad) > 2 * (rank(x) - 2):
            return function(x, pad, *rest)
        return channels_first(function(below, [0, 0, *pad], *rest))

    return lowered


ELEMENTWISE = (
    *(f"{name}.{kind}" for name in ("add", "sub", "mul", "div") for kind in ("Tensor", "Scalar")),
    *("maximum", "minimum", "pow.Tensor_Scalar", "clamp", "clamp_min", "clamp_max", "_to_copy"),
    *("abs", "neg", "exp", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "erf", "log"),
    *("relu", "relu6", "gelu", "silu", "mish", "softplus", "hardsigmoid", "hardswish"),
    *("hardtanh", "leaky_relu", "elu", "celu", "selu", "_prelu_kernel"),
)
LAYOUTS: tuple[tuple[Callable[[Lowering], Lowering], Sequence[str]], ...] = (
    (elementwise, ELEMENTWISE),
    (reduction, ("mean.dim", "sum.dim_IntList", "amax", "amin")),
    (concatenation, ("cat",)),
    (padding, ("constant_pad_nd",)),
)


def keep_layouts(table: dict[str, Lowering]) -> None:
    """Make the operators of ``table`` that can compute in the layout of their operands."""
    for layout, names in LAYOUTS:
        for name in names:
            table[name] = layout(table[name])
