"""Operators of complex tensors, by their real and imaginary parts.

TFLite has no complex tensors, and torch.onnx translates some of these operators for real ones
alone. A tensor that is not complex is left as it is. ``without_pairs`` then removes what only puts
two parts together and takes them apart again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from modelport.exporters.decompositions.table import COMPLEX, Decomposition, decomposes

aten = torch.ops.aten
Parts = tuple[Tensor, Tensor]
#: Longer transforms would need a large matrix.
MOST_POINTS = 2048


def _parts(x: Any) -> tuple[Any, Any]:
    """Real and imaginary part of a tensor or number, which may be real."""
    if isinstance(x, Tensor):
        if not x.is_complex():
            return x, torch.zeros_like(x)
        both = torch.view_as_real(x)
        return both.select(-1, 0), both.select(-1, 1)
    return (x.real, x.imag) if isinstance(x, complex) else (x, 0)


def _is_complex(*values: Any) -> bool:
    return any(isinstance(x, complex) or (isinstance(x, Tensor) and x.is_complex()) for x in values)


def _joined(real: Any, imag: Any) -> Any:
    if isinstance(real, list | tuple):
        return [torch.complex(*each) for each in zip(real, imag, strict=True)]
    return torch.complex(*aten.broadcast_tensors([real, imag]))


def _part_by_part(operator: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an operator that moves or adds elements to both parts; ``x`` may be a list."""
    several = isinstance(x, list | tuple)
    if not _is_complex(*(x if several else (x,))):
        return NotImplemented
    pairs = list(map(_parts, x)) if several else [_parts(x)]
    real, imag = ([each[side] for each in pairs] for side in (0, 1))
    if not several:
        real, imag = real[0], imag[0]
    return _joined(operator(real, *args, **kwargs), operator(imag, *args, **kwargs))


for _operator in (
    *(aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.default),
    *(aten.squeeze.dim, aten.squeeze.dims, aten.view.default, aten._unsafe_view.default),
    *(aten.permute.default, aten.transpose.int, aten.t.default, aten.expand.default),
    *(aten.clone.default, aten.alias.default, aten.cat.default, aten.stack.default),
    *(aten.index.Tensor, aten.index_select.default, aten.flip.default, aten.roll.default),
    *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.neg.default),
    *(aten.repeat.default, aten.gather.default, aten.split_with_sizes.default),
    *(
        aten.unbind.int,
        aten.constant_pad_nd.default,
        aten.zeros_like.default,
        aten.diagonal.default,
    ),
    *(aten.cumsum.default, aten.unfold.default),
):
    decomposes(_operator, table=COMPLEX)(partial(_part_by_part, _operator))


def _placed(operator: Any, place: int, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an operator that puts elements of the argument at ``place`` into ``x``."""
    if not _is_complex(x):
        return NotImplemented
    before, values, after = args[:place], _parts(args[place]), args[place + 1 :]
    pairs = zip(_parts(x), values, strict=True)
    return _joined(*(operator(a, *before, b, *after, **kwargs) for a, b in pairs))


for _operator, _place in (
    *((aten.copy.default, 0), (aten.slice_scatter.default, 0), (aten.select_scatter.default, 0)),
    *(
        (aten.diagonal_scatter.default, 0),
        (aten.index_put.default, 1),
        (aten.index_copy.default, 2),
    ),
    *((aten.index_add.default, 2), (aten.scatter.src, 2), (aten.scatter_add.default, 2)),
    *((aten.masked_fill.Scalar, 1), (aten.masked_fill.Tensor, 1)),
):
    decomposes(_operator, table=COMPLEX)(partial(_placed, _operator, _place))


def _binary(function: Callable[[Parts, Parts], Parts]) -> Callable[..., Any]:
    def decomposition(x: Any, y: Any, *, alpha: float = 1) -> Any:
        if not _is_complex(x, y):
            return NotImplemented
        real, imag = _parts(y)
        return _joined(*function(_parts(x), (real * alpha, imag * alpha)))

    return decomposition


@decomposes(aten.add.Tensor, aten.add.Scalar, table=COMPLEX)
@_binary
def add(x: Parts, y: Parts) -> Parts:
    return x[0] + y[0], x[1] + y[1]


@decomposes(aten.sub.Tensor, aten.sub.Scalar, table=COMPLEX)
@_binary
def sub(x: Parts, y: Parts) -> Parts:
    return x[0] - y[0], x[1] - y[1]


@decomposes(aten.mul.Tensor, aten.mul.Scalar, table=COMPLEX)
@_binary
def mul(x: Parts, y: Parts) -> Parts:
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


@decomposes(aten.div.Tensor, aten.div.Scalar, table=COMPLEX)
@_binary
def div(x: Parts, y: Parts) -> Parts:
    size = y[0] * y[0] + y[1] * y[1]
    return (x[0] * y[0] + x[1] * y[1]) / size, (x[1] * y[0] - x[0] * y[1]) / size


def _product(multiply: Callable[[Tensor, Tensor], Tensor], x: Any, y: Any) -> Any:
    """A product of two tensors that adds up products of their elements."""
    if not _is_complex(x, y):
        return NotImplemented
    (a, b), (c, d) = _parts(x), _parts(y)
    return torch.complex(multiply(a, c) - multiply(b, d), multiply(a, d) + multiply(b, c))


decomposes(
    *(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.matmul.default),
    table=COMPLEX,
)(partial(_product, torch.matmul))


@decomposes(aten.einsum.default, table=COMPLEX)
def einsum(equation: str, operands: Sequence[Tensor], **_: Any) -> Any:
    if len(operands) != 2:
        return NotImplemented
    return _product(partial(torch.einsum, equation), *operands)


@decomposes(aten.pow.Tensor_Scalar, table=COMPLEX)
def power(x: Tensor, exponent: Any) -> Any:
    if not x.is_complex() or exponent not in (2, 3):
        return NotImplemented
    return x * x if exponent == 2 else x * x * x


def _of_parts(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Any]:
    return lambda x: function(*_parts(x)) if x.is_complex() else NotImplemented


decomposes(aten.abs.default, table=COMPLEX)(_of_parts(torch.hypot))
decomposes(aten.angle.default, table=COMPLEX)(_of_parts(lambda a, b: torch.atan2(b, a)))
decomposes(
    aten._conj.default, aten._conj_physical.default, aten.conj_physical.default, table=COMPLEX
)(_of_parts(lambda a, b: torch.complex(a, -b)))
decomposes(aten.reciprocal.default, table=COMPLEX)(
    _of_parts(lambda a, b: torch.complex(a / (a * a + b * b), -b / (a * a + b * b)))
)
decomposes(aten.exp.default, table=COMPLEX)(_of_parts(lambda a, b: torch.polar(a.exp(), b)))


@decomposes(aten.polar.default, table=COMPLEX)
def polar(size: Tensor, angle: Tensor) -> Tensor:
    return torch.complex(size * angle.cos(), size * angle.sin())


@decomposes(aten.view_as_complex.default, table=COMPLEX)
def view_as_complex(x: Tensor) -> Tensor:
    return torch.complex(x.select(-1, 0), x.select(-1, 1))


@decomposes(aten.where.self, table=COMPLEX)
def where(condition: Tensor, x: Tensor, y: Tensor) -> Any:
    if not _is_complex(x, y):
        return NotImplemented
    (a, b), (c, d) = _parts(x), _parts(y)
    return torch.complex(torch.where(condition, a, c), torch.where(condition, b, d))


@decomposes(aten.full.default, aten.full_like.default, table=COMPLEX)
def full(size: Any, value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    like = size if isinstance(size, Tensor) else None
    if dtype is None:
        if not (_is_complex(value) or (like is not None and like.is_complex())):
            return NotImplemented
        dtype = like.dtype if like is not None else torch.complex64
    if not dtype.is_complex:
        return NotImplemented
    shape = size if like is None else like.shape
    real, imag = _parts(value)
    part = dtype.to_real()
    return torch.complex(torch.full(shape, real, dtype=part), torch.full(shape, imag, dtype=part))


@decomposes(aten.zeros.default, table=COMPLEX)
def zeros(size: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return full(size, 0, dtype=dtype) if dtype is not None else NotImplemented


@decomposes(aten._to_copy.default, table=COMPLEX)
def to_copy(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if dtype is None or not (x.is_complex() or dtype.is_complex):
        return NotImplemented
    real, imag = _parts(x)
    part = dtype.to_real() if dtype.is_complex else dtype
    return torch.complex(real.to(part), imag.to(part)) if dtype.is_complex else real.to(part)


def _rotation(points: Any, rows: Any, mode: int, sign: int, like: Tensor) -> Parts:
    """Cosines and sines of ``rows`` frequencies at ``points``, scaled.

    Args:
        mode: PyTorch's: scaled not at all, by the root, or by the number of points.
        sign: of the sines: -1 forward, 1 back.
    """
    steps = torch.arange(points, device=like.device)
    turns = (steps[:rows, None] * steps) % points  # exact angles
    if isinstance(points, int):  # a constant, unlike that of an open size, which TFLite computes
        turns = turns.to(torch.float64)
    angle = turns * (2 * math.pi / points)
    scale = 1.0 if mode == 0 else points**-0.5 if mode == 1 else 1 / points
    return (angle.cos() * scale).to(like.dtype), (angle.sin() * (sign * scale)).to(like.dtype)


def _along(axis: int, x: Tensor, matrix: Tensor) -> Tensor:
    return (x.movedim(axis, -1) @ matrix).movedim(-1, axis)


def _is_short(size: Any) -> bool:
    return statically_known_true(size <= MOST_POINTS)


@decomposes(aten._fft_r2c.default, table=COMPLEX)
def fft_r2c(x: Tensor, dim: Sequence[int], mode: int, onesided: bool) -> Any:
    *others, axis = dim
    size = x.shape[axis]
    if not _is_short(size):
        return NotImplemented
    is_last = not others and axis in (-1, x.dim() - 1)
    if onesided and is_last and isinstance(size, int) and size & (size - 1) == 0:
        return NotImplemented  # TFLite has that of a power of two
    rows = size // 2 + 1 if onesided else size
    parts = (_along(axis, x, part.mT) for part in _rotation(size, rows, mode, -1, x))
    y = torch.complex(*parts)
    return aten._fft_c2c(y, others, mode, True) if others else y


@decomposes(aten._fft_c2c.default, table=COMPLEX)
def fft_c2c(x: Tensor, dim: Sequence[int], mode: int, forward: bool) -> Any:
    if not all(_is_short(x.shape[axis]) for axis in dim):
        return NotImplemented
    real, imag = _parts(x)
    for axis in dim:
        size = x.shape[axis]
        cosine, sine = _rotation(size, size, mode, -1 if forward else 1, real)
        real, imag = (
            _along(axis, real, cosine) - _along(axis, imag, sine),
            _along(axis, real, sine) + _along(axis, imag, cosine),
        )
    return torch.complex(real, imag)


@decomposes(aten._fft_c2r.default, table=COMPLEX)
def fft_c2r(x: Tensor, dim: Sequence[int], mode: int, last: int) -> Any:
    if not _is_short(last):
        return NotImplemented
    *others, axis = dim
    if others:
        x = aten._fft_c2c(x, others, mode, False)
    rows = last // 2 + 1
    real, imag = (part.narrow(axis, 0, rows) for part in _parts(x))
    cosine, sine = _rotation(last, rows, mode, 1, real)
    place = torch.arange(rows, device=real.device)
    once = (place == 0) | (2 * place == last)  # others stand for a second, conjugate one
    weight = torch.where(once[:, None], 1.0, 2.0).to(real.dtype)
    return _along(axis, real, weight * cosine) - _along(axis, imag, weight * sine)


def with_parts(
    table: Mapping[Any, Decomposition], besides: Collection[Any] = ()
) -> dict[Any, Decomposition]:
    """Return ``table`` with the decompositions of complex tensors before its own.

    Args:
        besides: operators that are not decomposed.
    """
    ours = {op: _first(f, table.get(op)) for op, f in COMPLEX.items() if op not in besides}
    return {**table, **ours}


def _first(ours: Decomposition, other: Decomposition | None) -> Decomposition:
    def decomposition(*args: Any, **kwargs: Any) -> Any:
        found = ours(*args, **kwargs)
        return other(*args, **kwargs) if found is NotImplemented and other is not None else found

    return decomposition


def without_pairs(graph: fx.Graph) -> None:
    """Replace each part of a complex tensor by what it was made of."""
    for node in list(graph.nodes):
        whole = node.args[0] if node.args else None
        if node.target not in (aten.view_as_real.default, aten.view_as_real_copy.default):
            continue
        if not isinstance(whole, fx.Node) or whole.target is not aten.complex.default:
            continue
        rank = node.meta["val"].ndim
        for user in list(node.users):
            if user.target is aten.select.int and user.args[1] in (-1, rank - 1):
                user.replace_all_uses_with(whole.args[user.args[2]])
        if node.users:
            with graph.inserting_after(node):
                both = graph.call_function(aten.stack.default, (list(whole.args), -1))
            both.meta = dict(node.meta)
            node.replace_all_uses_with(both)
    graph.eliminate_dead_code()
