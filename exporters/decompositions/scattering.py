"""Writing by index, reductions of what is written to one place, and selections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelport.exporters.decompositions.selection import limit, numbers
from modelport.exporters.decompositions.table import decomposes

aten = torch.ops.aten


@decomposes(aten.scatter_add.default)
def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    if x.dtype is not torch.bool and x.dim() and index.dim():
        return NotImplemented
    return scatter_reduce(x, dim, index, source, "sum")


@decomposes(aten.scatter.reduce)
def scatter_with(x: Tensor, dim: int, index: Tensor, source: Tensor, *, reduce: str) -> Tensor:
    kind = {"add": "sum", "multiply": "prod"}[reduce]
    return torch.scatter_reduce(x, dim, index, source, kind)


@decomposes(aten.scatter.value_reduce)
def scatter_number_with(x: Tensor, dim: int, index: Tensor, value: float, *, reduce: str) -> Tensor:
    source = torch.full(index.shape, value, dtype=x.dtype, device=x.device)
    return scatter_with(x, dim, index, source, reduce=reduce)


@decomposes(aten.scatter_reduce.two)
def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """Sums, products and extremes that include ``x`` itself remain; they make all others."""
    if not x.dim() or not index.dim():
        row, where, values = (y if y.dim() else y.reshape(1) for y in (x, index, source))
        found = torch.scatter_reduce(row, dim, where, values, reduce, include_self=include_self)
        return found.reshape(x.shape)
    if x.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16):
        wide = torch.scatter_reduce(
            numbers(x), dim, index, numbers(source), reduce, include_self=include_self
        )
        return wide.to(x.dtype)
    if include_self and reduce != "mean":
        return NotImplemented
    ones = torch.ones_like(index)
    hits = torch.zeros_like(x, dtype=torch.int64).scatter_add(dim, index, ones)
    if not include_self:
        neutral = {"sum": 0, "mean": 0, "prod": 1}.get(reduce)
        fill = limit(x, largest=reduce == "amin") if neutral is None else neutral
        x = torch.where(hits > 0, fill, x)
    if reduce != "mean":
        return torch.scatter_reduce(x, dim, index, source, reduce)
    total = torch.scatter_reduce(x, dim, index, source, "sum")
    count = (hits + int(include_self)).clamp_min(1)
    return total / count if x.is_floating_point() else total // count


@decomposes(aten.index_reduce.default)
def index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    if x.dim():
        shape = [1] * x.dim()
        shape[dim] = -1
        index = index.reshape(shape).expand(source.shape)
    return torch.scatter_reduce(x, dim, index, source, reduce, include_self=include_self)


@decomposes(aten.put.default)
def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    where = torch.where(index < 0, index + x.numel(), index).reshape(-1)
    found = x.reshape(-1).index_put([where], source.reshape(-1), accumulate)
    return found.reshape(x.shape)


@decomposes(aten.diagonal_scatter.default)
def diagonal_scatter(
    x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    along = torch.arange(source.shape[-1], device=x.device)
    where: list[Tensor | None] = [along + max(-offset, 0), along + max(offset, 0)]
    moved = x.movedim((dim1, dim2), (0, 1)).index_put(where, source.movedim(-1, 0))
    return moved.movedim((0, 1), (dim1, dim2))


@decomposes(aten.pad.default)
def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Crop first what has a negative margin; repeat rows and columns by hand."""
    if mode == "constant":
        return aten.constant_pad_nd.default(x, pad, 0 if value is None else value)
    if any(not isinstance(each, int) for each in pad):
        return NotImplemented
    for place in range(len(pad) // 2):
        before, after, dim = pad[2 * place], pad[2 * place + 1], x.dim() - 1 - place
        x = x.narrow(dim, max(-before, 0), x.shape[dim] - max(-before, 0) - max(-after, 0))
    margins = [max(each, 0) for each in pad]
    if mode == "circular":
        for place in range(len(pad) // 2):
            before, after, dim = margins[2 * place], margins[2 * place + 1], x.dim() - 1 - place
            size = x.shape[dim]
            x = torch.cat([x.narrow(dim, size - before, before), x, x.narrow(dim, 0, after)], dim)
        return x
    kind = {"reflect": "reflection", "replicate": "replication"}[mode]
    return getattr(aten, f"{kind}_pad{len(pad) // 2}d").default(x, margins)


@decomposes(aten.unfold_backward.default)
def unfold_backward(x: Tensor, size: Sequence[int], dim: int, length: int, step: int) -> Any:
    """Add up the windows of ``x``; PyTorch's own decomposition has indices of 32 bits."""
    dim = dim % len(size)
    places = torch.arange(size[dim], device=x.device).unfold(0, length, step).flatten()
    windows = x.movedim(-1, dim + 1).flatten(dim, dim + 1)
    index = (*[None] * dim, places)
    return aten._unsafe_index_put(x.new_zeros(size), index, windows, accumulate=True)
