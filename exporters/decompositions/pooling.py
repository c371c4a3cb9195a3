"""Adaptive pooling, and sums over pairs and triples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelport.exporters.decompositions.table import decomposes

aten = torch.ops.aten


def _windows(size: int, wanted: int) -> tuple[Tensor, Tensor]:
    """The starts and the ends of the windows of adaptive pooling, as columns."""
    place = torch.arange(wanted).unsqueeze(-1)
    return place * size // wanted, ((place + 1) * size + wanted - 1) // wanted


@decomposes(aten._adaptive_avg_pool3d.default, aten._adaptive_avg_pool2d.default)
def adaptive_average(x: Tensor, output_size: Sequence[int]) -> Any:
    """The mean over windows is a product with a matrix along each dimension."""
    if not _is_known(x, output_size):
        return NotImplemented
    for place, wanted in enumerate(output_size, start=-len(output_size)):
        starts, ends = _windows(x.shape[place], wanted)
        along = torch.arange(x.shape[place])
        inside = ((along >= starts) & (along < ends)).to(x.dtype)
        means = inside / (ends - starts)
        x = (x.movedim(place, -1) @ means.mT).movedim(-1, place)
    return x


def _is_known(x: Tensor, output_size: Sequence[int]) -> bool:
    return all(isinstance(size, int) for size in x.shape[-len(output_size) :])


@decomposes(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_maximum(x: Tensor, output_size: Sequence[int]) -> Any:
    """The maximum over gathered windows, and its place in the plane."""
    count = len(output_size)
    if all(size == 1 for size in output_size):
        values, places = x.flatten(-count).max(-1)
        shape = (*x.shape[:-count], *[1] * count)
        return values.reshape(shape), places.reshape(shape)
    if not _is_known(x, output_size):
        return NotImplemented
    plane = x.shape[-count:]
    area = 1
    for size in plane:
        area *= size
    places = torch.arange(area).reshape(plane)
    kept = x.dim() - count
    for d, wanted in enumerate(output_size):
        starts, ends = _windows(plane[d], wanted)
        longest = -(-plane[d] // max(1, wanted)) + 1
        index = torch.minimum(starts + torch.arange(longest), ends - 1)
        x = x[(slice(None),) * (kept + 2 * d) + (index,)]
        places = places[(slice(None),) * (2 * d) + (index,)]
    inner = [2 * d + 1 for d in range(count)]
    outer = [2 * d for d in range(count)]
    places = places.permute(*outer, *inner).flatten(-count)
    x = x.permute(*range(kept), *(kept + d for d in (*outer, *inner))).flatten(-count)
    values, chosen = x.max(-1)
    found = places.expand(x.shape).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return values, found


@decomposes(aten._cdist_forward.default)
def distances(x: Tensor, other: Tensor, p: float, compute_mode: int | None = None) -> Tensor:
    """The p-norm of the difference of each pair of rows."""
    apart = (x.unsqueeze(-2) - other.unsqueeze(-3)).abs()
    if p == 0:
        return (apart != 0).sum(-1, dtype=x.dtype)
    if p == 1:
        return apart.sum(-1)
    if p == 2:
        return apart.square().sum(-1).sqrt()
    if p == float("inf"):
        return apart.amax(-1)
    return (apart**p).sum(-1) ** (1 / p)


@decomposes(aten._pdist_forward.default)
def distances_within(x: Tensor, p: float = 2) -> Any:
    """The distances of each row and those after it."""
    if not isinstance(x.shape[0], int):
        return NotImplemented
    if x.shape[0] < 2:
        return x.new_zeros(0)
    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1)
    return distances(x, x, p)[first, second]


@decomposes(aten._trilinear.default)
def trilinear(
    x: Tensor,
    second: Tensor,
    third: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """The sum of a product of three tensors, each with more dimensions of size 1."""
    product: Any = None
    for factor, dims in ((x, expand1), (second, expand2), (third, expand3)):
        for dim in sorted(dims):
            factor = factor.unsqueeze(dim)
        product = factor if product is None else product * factor
    total: Tensor = product.sum(list(sumdim)) if sumdim else product
    return total
