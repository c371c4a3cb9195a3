"""Variances and normalisation by the statistics of a batch, which may be empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from modelport.exporters.decompositions.table import decomposes

aten = torch.ops.aten


def _moments(x: Tensor, dims: Any, correction: Any, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The variance and the mean; NaN where there is nothing to divide by."""
    along = list(range(x.dim())) if dims is None or not len(dims) else [d % x.dim() for d in dims]
    count: Any = 1
    for dim in along:
        count = count * x.shape[dim]
    mean = x.sum(along, keepdim=True) / count
    correction = 1 if correction is None else correction
    freedom = count - correction
    if not isinstance(freedom, torch.SymInt):
        freedom = max(freedom, 0)
    variance = (x - mean).square().sum(along, keepdim=keepdim) / freedom
    return variance, mean if keepdim else mean.reshape(variance.shape)


def _is_left(x: Tensor) -> bool:
    return x.is_complex() or not x.dim()


@decomposes(aten.var.correction)
def var(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return NotImplemented if _is_left(x) else _moments(x, dim, correction, keepdim)[0]


@decomposes(aten.std.correction)
def std(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return NotImplemented if _is_left(x) else _moments(x, dim, correction, keepdim)[0].sqrt()


@decomposes(aten.var_mean.correction)
def var_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return NotImplemented if _is_left(x) else _moments(x, dim, correction, keepdim)


@decomposes(aten.std_mean.correction)
def std_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    if _is_left(x):
        return NotImplemented
    variance, mean = _moments(x, dim, correction, keepdim)
    return variance.sqrt(), mean


@decomposes(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    shape: Sequence[int] = [1, -1, *[1] * (x.dim() - 2)]
    if training:
        found, middle = _moments(x, [0, *range(2, x.dim())], 0, keepdim=True)
    else:
        assert mean is not None
        assert variance is not None
        found, middle = variance.reshape(shape), mean.reshape(shape)
    scale = (found + eps).rsqrt()
    result = (x - middle) * scale
    result = result if weight is None else result * weight.reshape(shape)
    result = result if bias is None else result + bias.reshape(shape)
    used = (each.reshape(-1) if training else x.new_zeros(0) for each in (middle, scale))
    return result, *used


@decomposes(aten._native_batch_norm_legit.no_stats)
def batch_norm_alone(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    return batch_norm(x, weight, bias, None, None, training, momentum, eps)


@decomposes(aten._native_batch_norm_legit_functional.default)
def batch_norm_with_statistics(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Batch normalisation, and the running statistics after it."""
    if not training:
        given = x, weight, bias, mean, variance, momentum, eps
        return *aten._native_batch_norm_legit_no_training.default(*given), mean, variance
    found = batch_norm(x, weight, bias, mean, variance, training, momentum, eps)
    unbiased = _moments(x, [0, *range(2, x.dim())], 1, keepdim=False)[0]
    kept = 1 - momentum
    return *found, momentum * found[1] + kept * mean, momentum * unbiased + kept * variance


@decomposes(aten.native_group_norm.default)
def group_norm(x: Tensor, *arguments: Any) -> Any:
    """Normalise nothing with known sizes; torch.onnx lets the runtime infer one, which it cannot
    from no elements."""
    if any(isinstance(size, int) and size == 0 for size in x.shape):
        return decomposition_table[aten.native_group_norm.default](x, *arguments)
    return NotImplemented
