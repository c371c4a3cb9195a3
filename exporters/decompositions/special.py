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
    value = torch.where(w < 5, horner(near, _NEAR), horner(far, _FAR)) * x
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


def horner(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    value = torch.full_like(x, coefficients[0])
    for each in coefficients[1:]:
        value = value * x + each
    return value


def error_function(x: Tensor) -> Tensor:
    """Eigen's rational approximation (``generic_fast_erf_float``); 1 from 4 on."""
    near = x.clamp(-4, 4)
    square = near * near
    return torch.where(x.isnan(), x, near * horner(square, _OVER) / horner(square, _UNDER))


_OVER = (
    *(-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05),
    *(-7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02),
)
_UNDER = (
    *(-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03),
    *(-7.37332916720468e-03, -1.42647390514189e-02),
)


@decomposes(aten.special_erfcx.default, prims.erfcx.default)
def erfcx(x: Tensor) -> Tensor:
    """The polynomials of Cephes' ``erfcf`` in ``1 / x**2`` from 1 on."""
    x = floating(x)
    size = x.abs()
    inverse = size.clamp_min(1).reciprocal()
    square = inverse * inverse
    far = inverse * torch.where(size < 2, horner(square, _MIDDLE), horner(square, _TAIL))
    growth = (x * x).exp()
    value = torch.where(size < 1, growth * (1 - error_function(size)), far)
    return torch.where(size != x, 2 * growth - value, value)


_MIDDLE = (
    *(2.326819970068386e-2, -1.387039388740657e-1, 3.687424674597105e-1, -5.824733027278666e-1),
    *(6.210004621745983e-1, -4.944515323274145e-1, 3.404879937665872e-1, -2.741127028184656e-1),
    5.638259427386472e-1,
)
_TAIL = (
    *(-1.047766399936249e1, 1.297719955372516e1, -7.495518717768503, 2.921019019210786),
    *(-1.015265279202700, 4.218463358204948e-1, -2.820767439740514e-1, 5.641895067754075e-1),
)


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
