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


@decomposes(aten.isclose.default)
def isclose(
    x: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Tensor:
    x, other = _promoted(x, other)
    close = x == other
    if equal_nan and x.is_floating_point():
        close = close | (x.isnan() & other.isnan())
    if not x.is_floating_point():
        x, other = x.to(torch.int64), other.to(torch.int64)
    apart = (x - other).abs()
    allowed = atol + (rtol * other).abs()
    return close | ((apart < torch.inf) & (apart <= allowed))


@decomposes(aten.take.default)
def take(x: Tensor, index: Tensor) -> Tensor:
    where = torch.where(index < 0, index + x.numel(), index)
    return x.reshape(-1).index_select(0, where.reshape(-1)).reshape(index.shape)


@decomposes(aten.linalg_vector_norm.default)
def vector_norm(x: Tensor, order: float = 2, *args: Any, **kwargs: Any) -> Any:
    """A number has no axis, though PyTorch lets one name it; torch.onnx drops all axes of a norm
    that names none."""
    rest = dict(zip(("dim", "keepdim"), args, strict=False)) | kwargs
    if x.dim() and not rest.get("dim") and rest.get("keepdim"):
        return aten.linalg_vector_norm.default(x, order, **{**rest, "dim": [*range(x.dim())]})
    if x.dim() or x.is_complex():
        return NotImplemented
    found = x.to(rest.get("dtype") or x.dtype)
    return (found != 0).to(found.dtype) if order == 0 else found.abs()


@decomposes(aten.rrelu_with_noise.default)
def rrelu(
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    if training:
        return NotImplemented
    return torch.where(x >= 0, x, x * ((lower + upper) / 2))


@decomposes(aten.rrelu_with_noise_functional.default)
def rrelu_and_noise(x: Tensor, noise: Tensor, *rest: Any, **options: Any) -> Any:
    found = rrelu(x, noise, *rest, **options)
    return found if found is NotImplemented else (found, noise)


@decomposes(aten.addmm.default)
def addmm(x: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Multiply integers and add; ONNX Runtime does both at once for floats only."""
    if left.is_floating_point() or left.is_complex():
        return NotImplemented
    product = left @ right
    return (x if beta == 1 else x * beta) + (product if alpha == 1 else product * alpha)


def _over_all(x: Tensor, dims: Any, keepdim: bool, reduce: Any) -> Any:
    """An extreme of all elements; torch.onnx translates that of some dimensions."""
    if dims:
        return NotImplemented
    return reduce(x, list(range(x.dim())), keepdim) if x.dim() else x.clone()


@decomposes(aten.amax.default)
def amax(x: Tensor, dim: Any = (), keepdim: bool = False) -> Any:
    return _over_all(x, dim, keepdim, torch.amax)


@decomposes(aten.amin.default)
def amin(x: Tensor, dim: Any = (), keepdim: bool = False) -> Any:
    return _over_all(x, dim, keepdim, torch.amin)


@decomposes(aten.squeeze.dim, aten.squeeze.dims)
def squeeze(x: Tensor, dim: Any) -> Any:
    """Remove dimensions of size 1 alone, one by one; ONNX refuses to remove others."""
    dims = {each % max(1, x.dim()) for each in ([dim] if isinstance(dim, int) else dim)}
    left = [d for d in sorted(dims) if x.dim() and isinstance(x.shape[d], int) and x.shape[d] == 1]
    if isinstance(dim, int) and (left or not x.dim()):
        return NotImplemented
    for each in reversed(left):
        x = aten.squeeze.dim(x, each)
    return x if left else x.clone()


@decomposes(aten.pow.Tensor_Scalar)
def power(x: Tensor, exponent: Any) -> Any:
    """Convert truth values first; ONNX has no power of them."""
    if x.dtype is not torch.bool:
        return NotImplemented
    return x.to(torch.result_type(x, exponent)) ** exponent


@decomposes(aten.squeeze_copy.dim, aten.squeeze_copy.dims)
def squeeze_copy(x: Tensor, dim: Any) -> Tensor:
    dims = [dim] if isinstance(dim, int) else dim
    chosen = {each % max(1, x.dim()) for each in dims}
    kept = [n for d, n in enumerate(x.shape) if d not in chosen or n != 1]
    return x.reshape(kept).clone()


@decomposes(aten.softmax.int)
def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Convert first; torch.onnx converts the result."""
    return aten._softmax.default(x if dtype is None else x.to(dtype), dim, False)


@decomposes(aten.log_softmax.int)
def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    return aten._log_softmax.default(x if dtype is None else x.to(dtype), dim, False)
