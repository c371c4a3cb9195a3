"""Special functions, to the precision of float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from modelport.exporters.decompositions.elementwise import floating
from modelport.exporters.decompositions.table import decomposes

aten, prims = torch.ops.aten, torch.ops.prims

#: Steps of the recurrence before the asymptotic series, whose first omitted term is below 1e-9.
_SHIFT = 7


@decomposes(aten.lgamma.default, prims.lgamma.default)
def lgamma(x: Tensor) -> Tensor:
    """Stirling's series, and the reflection formula below 1/2."""
    x = floating(x)
    reflected = x < 0.5
    y = torch.where(reflected, 1 - x, x)
    product = y
    for step in range(1, _SHIFT):
        product = torch.where(y < _SHIFT, product * (y + step), product)
    z = torch.where(y < _SHIFT, y + _SHIFT, y)
    square = z.square().reciprocal()
    series = (1 / 12 - square * (1 / 360 - square / 1260)) / z
    stirling = (z - 0.5) * (z.log() - 1) - 0.5 + 0.5 * math.log(2 * math.pi) + series
    value = torch.where(y < _SHIFT, stirling - product.log(), stirling)
    sine = (math.pi * (x - x.round()).abs()).sin()
    value = torch.where(reflected, math.log(math.pi) - sine.log() - value, value)
    return torch.where(x.isinf(), torch.inf, value)


@decomposes(aten.digamma.default, prims.digamma.default)
def digamma(x: Tensor) -> Tensor:
    """The asymptotic series, and the reflection formula below 1/2."""
    x = floating(x)
    reflected = x < 0.5
    y = torch.where(reflected, 1 - x, x)
    before = torch.zeros_like(y)
    for step in range(_SHIFT):
        before = before + (y + step).reciprocal()
    z = y + _SHIFT
    square = z.square().reciprocal()
    series = square * (1 / 12 - square * (1 / 120 - square / 252))
    value = z.log() - 0.5 / z - series - before
    fraction = x - x.round()
    other = value - math.pi / (math.pi * fraction).tan()
    value = torch.where(reflected, torch.where(fraction == 0, torch.nan, other), value)
    return torch.where(x == 0, -x.reciprocal(), value)


@decomposes(aten.polygamma.default)
def polygamma(n: int, x: Tensor) -> Tensor:
    """Derivatives of digamma, by the Euler-Maclaurin formula of Hurwitz' zeta function."""
    if n == 0:
        return digamma(x)
    x = floating(x)
    s, steps = n + 1, 12
    total = torch.zeros_like(x)
    for step in range(steps):
        total = total + (x + step) ** -s
    z = x + steps
    total = total + z ** (1 - s) / (s - 1) + 0.5 * z**-s
    total = total + s / 12 * z ** (-s - 1) - s * (s + 1) * (s + 2) / 720 * z ** (-s - 3)
    pole = (x <= 0) & (x == x.floor())
    sign = 1.0 if n % 2 else -1.0
    return sign * math.factorial(n) * torch.where(pole, torch.inf, total)


@decomposes(aten.erfinv.default, prims.erf_inv.default)
def erfinv(x: Tensor) -> Tensor:
    """Giles' polynomials, and a step of Newton's method."""
    x = floating(x)
    w = -((1 - x) * (1 + x)).log()
    near, far = w - 2.5, w.clamp_min(0).sqrt() - 3
    value = torch.where(w < 5, _horner(near, _NEAR), _horner(far, _FAR)) * x
    return torch.where(x.abs() == 1, x * torch.inf, value)


#: Coefficients of "Approximating the erfinv function" (GPU Computing Gems, 2010).
_NEAR = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_FAR = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)


def _horner(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    value = torch.full_like(x, coefficients[0])
    for each in coefficients[1:]:
        value = value * x + each
    return value


@decomposes(aten.special_ndtri.default, prims.ndtri.default)
def ndtri(x: Tensor) -> Tensor:
    return math.sqrt(2) * erfinv(2 * floating(x) - 1)


#: Angles of the trapezoidal rule, which converges exponentially for a periodic function.
_ANGLES = 128


def _scaled_bessel(x: Tensor, order: int) -> Tensor:
    """The modified Bessel function of ``|x|`` times ``exp(-|x|)``, by its integral."""
    size = floating(x).abs().unsqueeze(-1)
    angles = (torch.arange(_ANGLES, device=x.device) + 0.5) * (math.pi / _ANGLES)
    within = size.clamp_max(1000)
    mean = (((angles.cos() - 1) * within).exp() * (order * angles).cos()).mean(-1)
    far = size.squeeze(-1).clamp_min(1)
    first = (4 * order**2 - 1) / 8
    series = (1 - first / far) / (2 * math.pi * far).sqrt()
    return torch.where(size.squeeze(-1) > 1000, series, mean)


@decomposes(aten.special_i0e.default, prims.bessel_i0e.default)
def i0e(x: Tensor) -> Tensor:
    return _scaled_bessel(x, 0)


@decomposes(aten.special_i1e.default, prims.bessel_i1e.default)
def i1e(x: Tensor) -> Tensor:
    return _scaled_bessel(x, 1) * floating(x).sign()


@decomposes(aten.i0.default, prims.bessel_i0.default)
def i0(x: Tensor) -> Tensor:
    return i0e(x) * floating(x).abs().exp()


@decomposes(aten.special_i1.default, prims.bessel_i1.default)
def i1(x: Tensor) -> Tensor:
    return i1e(x) * floating(x).abs().exp()
