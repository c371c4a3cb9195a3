"""Sorting, selection and running results, by top-k and comparisons of all pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelport.exporters.decompositions.table import decomposes

aten = torch.ops.aten

#: Integers that ONNX Runtime's and TFLite's kernels compare; they hold these datatypes.
_SMALL = (torch.bool, torch.uint8, torch.int8, torch.int16)


def numbers(x: Tensor) -> Tensor:
    return x.to(torch.int32) if x.dtype in _SMALL else x


def _top(x: Tensor, count: Any, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The extreme elements in order; of equal ones the first comes first."""
    if not x.dim():
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    values, places = torch.topk(numbers(x), count, dim, largest)
    return values.to(x.dtype), places


def _length(x: Tensor, dim: int) -> Any:
    return x.shape[dim] if x.dim() else 1


@decomposes(aten.embedding_renorm.default)
def embedding_renorm(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    norm = torch.linalg.vector_norm(weight, norm_type, 1, keepdim=True)
    used = torch.zeros_like(norm).index_fill(0, indices.flatten(), 1)
    scaled = weight * (max_norm / (norm + 1e-7))
    return torch.where((norm > max_norm) & (used > 0), scaled, weight)


@decomposes(aten.sort.default)
def sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    return _top(x, _length(x, dim), dim, descending)


@decomposes(aten.sort.stable)
def sort_stably(
    x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    return sort(x, dim, descending)


@decomposes(aten.kthvalue.default)
def kthvalue(x: Tensor, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, places = _top(x, k, dim, largest=False)
    return _last(values, dim, keepdim), _last(places, dim, keepdim)


def _last(x: Tensor, dim: int, keepdim: bool) -> Tensor:
    if not x.dim():
        return x
    last = x.narrow(dim, x.shape[dim] - 1, 1)
    return last if keepdim else last.squeeze(dim)


@decomposes(aten.median.dim)
def median_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower of two middle elements; NaN if one is."""
    values, places = kthvalue(x, (_length(x, dim) + 1) // 2, dim, keepdim)
    if not x.is_floating_point():
        return values, places
    nan = x.isnan()
    if not x.dim():
        return values, places
    first = nan.to(torch.int32).argmax(dim, keepdim)
    some = nan.any(dim, keepdim)
    return torch.where(some, torch.nan, values), torch.where(some, first, places)


@decomposes(aten.median.default)
def median(x: Tensor) -> Tensor:
    return median_along(x.reshape(-1), 0)[0]


@decomposes(aten.nanmedian.dim)
def nanmedian_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower of two middle elements of those that are no NaN."""
    if not x.is_floating_point() or not x.dim():
        return median_along(x, dim, keepdim)
    nan = x.isnan()
    values, places = sort(torch.where(nan, torch.inf, x), dim)
    count = (~nan).sum(dim, keepdim=True)
    middle = ((count - 1) // 2).clamp_min(0)
    found = torch.where(count > 0, values.gather(dim, middle), torch.nan)
    place = places.gather(dim, middle)
    return (found, place) if keepdim else (found.squeeze(dim), place.squeeze(dim))


@decomposes(aten.nanmedian.default)
def nanmedian(x: Tensor) -> Tensor:
    return nanmedian_along(x.reshape(-1), 0)[0]


@decomposes(aten.mode.default)
def mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The most frequent element, the smallest of several, and its last place."""
    if not x.dim():
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    rows = numbers(x).movedim(dim, -1)
    counts = (rows.unsqueeze(-1) == rows.unsqueeze(-2)).sum(-1)
    frequent = counts == counts.amax(-1, keepdim=True)
    values = torch.where(frequent, rows, limit(rows, largest=True)).amin(-1, keepdim=True)
    along = torch.arange(rows.shape[-1], device=x.device)
    places = torch.where(rows == values, along, -1).amax(-1, keepdim=True)
    found = [each.movedim(-1, dim) for each in (values.to(x.dtype), places)]
    return (found[0], found[1]) if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))


def limit(x: Tensor, largest: bool) -> float:
    if x.is_floating_point():
        return torch.inf if largest else -torch.inf
    return torch.iinfo(x.dtype).max if largest else torch.iinfo(x.dtype).min


def _prefixes(x: Tensor, dim: int, fill: float) -> tuple[Tensor, Tensor]:
    """For each place along ``dim``, all elements up to it in a last dimension, the others being
    ``fill``; and which those are."""
    rows = x.movedim(dim, -1)
    along = torch.arange(rows.shape[-1], device=x.device)
    before = along.unsqueeze(-1) >= along
    return torch.where(before, rows.unsqueeze(-2), fill), before


@decomposes(aten.cumprod.default)
def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    integer = not (x.is_floating_point() or x.is_complex())
    x = x.to(dtype or (torch.int64 if integer else x.dtype))
    return _prefixes(x, dim, 1)[0].prod(-1).movedim(-1, dim) if x.dim() else x.clone()


def _running(x: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The running extreme and the index of its last occurrence so far."""
    if not x.dim():
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    whole = numbers(x)
    rows, before = _prefixes(whole, dim, limit(whole, not largest))
    values = rows.amax(-1) if largest else rows.amin(-1)
    same = rows == values.unsqueeze(-1)
    if x.is_floating_point():
        nan = rows.isnan()
        values = torch.where(nan.any(-1), torch.nan, values)
        same = torch.logical_or(same & ~nan.any(-1, keepdim=True), nan)
    along = torch.arange(x.shape[dim], device=x.device)
    places = torch.where(same & before, along, -1).amax(-1)
    return values.to(x.dtype).movedim(-1, dim), places.movedim(-1, dim)


@decomposes(aten.cummax.default)
def cummax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _running(x, dim, largest=True)


@decomposes(aten.cummin.default)
def cummin(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _running(x, dim, largest=False)


@decomposes(aten.searchsorted.Tensor)
def searchsorted(
    sorted_sequence: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """The number of elements of a row that come before each of ``x``."""
    rows = sorted_sequence if sorter is None else sorted_sequence.gather(-1, sorter)
    rows, x = rows if rows.dim() == 1 else rows.unsqueeze(-2), x.unsqueeze(-1)
    before = rows <= x if right or side == "right" else rows < x
    return before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


@decomposes(aten.searchsorted.Scalar)
def searchsorted_number(sorted_sequence: Tensor, x: float, **options: Any) -> Tensor:
    return searchsorted(
        sorted_sequence, torch.full((), x, device=sorted_sequence.device), **options
    )


@decomposes(aten.bucketize.Tensor)
def bucketize(
    x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


@decomposes(aten.bucketize.Scalar)
def bucketize_number(x: float, boundaries: Tensor, **options: Any) -> Tensor:
    return searchsorted_number(boundaries, x, **options)


@decomposes(aten.nonzero_static.default)
def nonzero_static(x: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """Write the place of each element that is not 0 to its number; what is left has no place."""
    chosen = x.reshape(-1) != 0
    number = chosen.to(torch.int64).cumsum(0) - 1
    target = torch.where(chosen & (number < size), number, size)
    places = torch.zeros(size + 1, dtype=torch.int64, device=x.device)
    places = places.scatter(0, target, torch.arange(x.numel(), device=x.device))[:size]
    columns = []
    for length in reversed(x.shape):
        divisor = 1 if isinstance(length, int) and not length else length
        columns.append(places % divisor)
        places = places // divisor
    if not columns:
        return places.new_empty(size, 0)
    used = torch.arange(size, device=x.device) < chosen.sum()
    return torch.where(used.unsqueeze(1), torch.stack(columns[::-1], 1), fill_value)
