"""Elementwise functions, by simpler ones."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from modelport.exporters.decompositions.table import decomposes

aten, prims = torch.ops.aten, torch.ops.prims


def floating(x: Tensor) -> Tensor:
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())


def _promoted(x: Any, other: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.result_type(x, other)
    x, other = (y if isinstance(y, Tensor) else torch.full((), y) for y in (x, other))
    return x.to(dtype), other.to(dtype)


def _is_negative(x: Tensor) -> Tensor:
    """The sign bit; -0.0 has it, and no comparison sees that."""
    return (x < 0) | ((x == 0) & (x.reciprocal() < 0)) if x.is_floating_point() else x < 0


@decomposes(aten.signbit.default)
def signbit(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.dtype is torch.bool else _is_negative(x)


@decomposes(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(x: Tensor, other: Any) -> Tensor:
    x, other = (floating(each) for each in _promoted(x, other))
    return torch.where(_is_negative(other), -x.abs(), x.abs())


@decomposes(aten.fmax.default)
def fmax(x: Tensor, other: Tensor) -> Tensor:
    """The larger number; NaN only if both are."""
    x, other = _promoted(x, other)
    if not x.is_floating_point():
        return torch.maximum(x, other)
    return torch.where(x.isnan(), other, torch.where(other.isnan(), x, torch.maximum(x, other)))


@decomposes(aten.fmin.default)
def fmin(x: Tensor, other: Tensor) -> Tensor:
    x, other = _promoted(x, other)
    if not x.is_floating_point():
        return torch.minimum(x, other)
    return torch.where(x.isnan(), other, torch.where(other.isnan(), x, torch.minimum(x, other)))


@decomposes(aten.hypot.default)
def hypot(x: Tensor, other: Tensor) -> Tensor:
    """The root of the sum of squares, whose squares do not overflow."""
    x, other = _promoted(x, other)
    large, small = torch.maximum(x.abs(), other.abs()), torch.minimum(x.abs(), other.abs())
    ratio = torch.where(small == 0, small, small / large)
    return torch.where(large.isinf(), large, large * (1 + ratio * ratio).sqrt())


@decomposes(aten.frexp.Tensor)
def frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mantissa from 1/2 to 1, and the exponent of 2."""
    size = x.abs()
    odd = (size == 0) | ~size.isfinite()
    exponent = torch.where(odd, 0, torch.where(odd, 1, size).log2().floor() + 1)
    # The logarithm may round up or down to the next power.
    exponent = exponent + (~odd & (size * torch.exp2(-exponent) >= 1)).to(x.dtype)
    exponent = exponent - (~odd & (size * torch.exp2(-exponent) < 0.5)).to(x.dtype)
    return x * torch.exp2(-exponent), exponent.to(torch.int32)


@decomposes(aten.gcd.default)
def gcd(x: Tensor, other: Tensor) -> Tensor:
    """Euclid's algorithm, in as many steps as the largest Fibonacci numbers need."""
    x, other = _promoted(x, other)
    a, b = x.abs(), other.abs()
    for _ in range(math.ceil(1.45 * torch.iinfo(x.dtype).bits)):
        done = b == 0
        a, b = torch.where(done, a, b), torch.where(done, b, a % torch.where(done, 1, b))
    return a


@decomposes(aten.lcm.default)
def lcm(x: Tensor, other: Tensor) -> Tensor:
    x, other = _promoted(x, other)
    common = gcd(x, other)
    return (x // torch.where(common == 0, 1, common) * other).abs()
