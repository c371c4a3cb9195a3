"""Functions that TFLite's built-in operators lack, to the precision of float32.

The converter fails to fold ``x < 0`` of a truth value, so that signs are told by ``abs(x) != x``.
Polynomials are those of Moshier's Cephes library (netlib.org/cephes, ``single``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from modelport.exporters.decompositions.elementwise import floating
from modelport.exporters.decompositions.special import erfcx, error_function, horner
from modelport.exporters.decompositions.table import BUILT_IN, decomposes

aten, prims = torch.ops.aten, torch.ops.prims

#: From here on, ``x`` and the root of ``x * x + 1`` are equal.
_FAR = 1500


@decomposes(aten.sinh.default, table=BUILT_IN)
def sinh(x: Tensor) -> Tensor:
    """Taylor's series below 1; halves of exponentials overflow no earlier than the result."""
    x = floating(x)
    square, root = x * x, (x.abs() / 2).exp()
    near = x + x * square * horner(square, (1 / 362880, 1 / 5040, 1 / 120, 1 / 6))
    far = root / 2 * root - 0.5 / root / root
    return torch.where(x.abs() < 1, near, torch.where(x.abs() != x, -far, far))


@decomposes(aten.cosh.default, table=BUILT_IN)
def cosh(x: Tensor) -> Tensor:
    root = (floating(x).abs() / 2).exp()
    return root / 2 * root + 0.5 / root / root


@decomposes(aten.tan.default, table=BUILT_IN)
def tan(x: Tensor) -> Tensor:
    """Subtract quarters of a turn, given in three parts: near a pole, a cosine has few digits."""
    x = floating(x)
    quarters = (x * (2 / math.pi)).round()
    for part in (1.5703125, 4.837512969970703e-4, 7.549789954891882e-8):
        x = x - quarters * part
    odd = quarters != 2 * (quarters / 2).floor()
    return torch.where(odd, -x.cos(), x.sin()) / torch.where(odd, x.sin(), x.cos())


@decomposes(aten.asinh.default, table=BUILT_IN)
def asinh(x: Tensor) -> Tensor:
    x = floating(x)
    size, square = x.abs(), x * x
    near = x + x * square * horner(square, _ASINH)
    far = (size + (square + 1).sqrt()).log()
    far = torch.where(size > _FAR, size.log() + math.log(2), far)
    return torch.where(size < 0.5, near, torch.where(size != x, -far, far))


@decomposes(aten.acosh.default, table=BUILT_IN)
def acosh(x: Tensor) -> Tensor:
    x = floating(x)
    above = x - 1
    far = (x + (above * (x + 1)).sqrt()).log()
    far = torch.where(x > _FAR, x.log() + math.log(2), far)
    value = torch.where(above < 0.5, above.sqrt() * horner(above, _ACOSH), far)
    return torch.where(x < 1, torch.nan, value)


@decomposes(aten.atanh.default, table=BUILT_IN)
def atanh(x: Tensor) -> Tensor:
    x = floating(x)
    square = x * x
    near = x + x * square * horner(square, _ATANH)
    return torch.where(x.abs() < 0.5, near, 0.5 * ((1 + x) / (1 - x)).log())


_ASINH = (2.0122003309e-2, -4.2699340972e-2, 7.4847586088e-2, -1.6666288134e-1)
_ACOSH = (1.7596881071e-3, -7.5272886713e-3, 2.6454905019e-2, -1.1784741703e-1, 1.4142135263)
_ATANH = (
    *(1.81740078349e-1, 8.24370301058e-2, 1.46691431730e-1, 1.99782164500e-1, 3.33337300303e-1),
)


@decomposes(aten.erfc.default, aten.special_erfc.default, table=BUILT_IN)
def erfc(x: Tensor) -> Tensor:
    """``exp(-x * x) * erfcx(x)`` from 1 on; the square of the exponent's larger part is exact."""
    x = floating(x)
    within = x.clamp(0, 16)
    large = (16 * within).round() / 16
    scale = (-large * large).exp() * ((large - within) * (large + within)).exp()
    return torch.where(x < 1, 1 - error_function(x), scale * erfcx(x.clamp_min(0)))


@decomposes(aten.special_ndtr.default, table=BUILT_IN)
def ndtr(x: Tensor) -> Tensor:
    return 0.5 * erfc(-math.sqrt(0.5) * floating(x))
