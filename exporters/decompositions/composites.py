"""Functions of PyTorch that a tracer cannot pass, because they ask for values, and their variants.

They are made of other operators by code of C++ that asks, for example, whether weights are
positive.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def covariance(
    x: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    x = x if x.dim() > 1 else x.reshape(1, -1)
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    weights = [each for each in (fweights, aweights) if each is not None]
    weight = torch.ones_like(x[0].real)
    for each in weights:
        weight = weight * each
    total = weight.sum()
    if aweights is None or not correction:
        freedom = total - correction
    else:
        freedom = total - correction * (weight * aweights).sum() / total
    apart = x - ((x * weight).sum(1) / total).unsqueeze(1)
    found: Tensor = (apart * weight) @ apart.mT.conj() / freedom.clamp_min(0)
    return found.squeeze()


def correlation(x: Tensor) -> Tensor:
    found = covariance(x)
    if not found.dim():
        return found / found
    deviation = found.diagonal().real.sqrt()
    found = found / deviation.unsqueeze(1) / deviation
    return found if found.is_complex() else found.clamp(-1, 1)


def combinations(x: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    rows = [torch.stack([x[place] for place in row]) for row in choose(range(x.shape[0]), r)]
    return torch.stack(rows) if rows and r else x.new_empty(len(rows), r)


def narrow(x: Tensor, dim: int, start: Tensor, length: int) -> Tensor:
    first = torch.where(start < 0, start + x.shape[dim], start)
    return x.index_select(dim, first + torch.arange(length))


def inverse(x: Tensor) -> Tensor:
    """An inverse without a check, as those below: a graph raises no errors."""
    found: Tensor = torch.linalg.inv_ex(x)[0]
    return found


def solve(x: Tensor, other: Tensor, *, left: bool = True) -> Tensor:
    found: Tensor = torch.linalg.solve_ex(x, other, left=left)[0]
    return found


def cholesky(x: Tensor, *, upper: bool = False) -> Tensor:
    found: Tensor = torch.linalg.cholesky_ex(x, upper=upper)[0]
    return found


def lu_factor(x: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor]:
    factors, swaps, _ = torch.linalg.lu_factor_ex(x, pivot=pivot)
    return factors, swaps


COMPOSITES: dict[Any, Callable[..., Any]] = {
    aten.linalg_cholesky.default: cholesky,
    aten.linalg_inv.default: inverse,
    aten.linalg_lu_factor.default: lu_factor,
    aten.linalg_solve.default: solve,
    aten.combinations.default: combinations,
    aten.corrcoef.default: correlation,
    aten.cov.default: covariance,
    aten.narrow.Tensor: narrow,
}


@contextmanager
def traceable_composites() -> Iterator[None]:
    """Trace these variants."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    try:
        for operator, function in COMPOSITES.items():
            operator.py_kernels[key] = function
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator in COMPOSITES:
            operator.py_kernels.pop(key, None)
            operator._dispatch_cache.clear()
