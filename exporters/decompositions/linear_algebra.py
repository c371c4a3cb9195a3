"""Factorisations and solutions of small matrices, one column after another.

The columns are written out, so that a graph has as many steps as the matrix has columns. The number
of columns has to be known; batches may have any size.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from modelport.exporters.decompositions.table import F, decomposes

aten = torch.ops.aten

#: Most columns: a longer graph would cost more than it says.
MOST_COLUMNS = 64


def _of_known_size(function: F) -> F:
    """Leave the operator as it is where the matrix is large, or of unknown size."""

    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        known = all(isinstance(size, int) and size <= MOST_COLUMNS for size in x.shape[-2:])
        real = not x.is_complex()
        return function(x, *args, **kwargs) if known and real else NotImplemented

    return cast(F, decomposed)


def _broadcast(*shapes: Any) -> Any:
    return torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]


def _no_error(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[:-2], dtype=torch.int32, device=x.device)


def _factorised(a: Tensor, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """L and U in one matrix, the rows in their new order, and LAPACK's swaps of rows."""
    rows, columns = a.shape[-2:]
    down, across = torch.arange(rows), torch.arange(columns)
    order = down.expand(a.shape[:-1])
    swaps = []
    for k in range(min(rows, columns)):
        if pivot:
            best = a[..., k:, k].abs().argmax(-1, keepdim=True) + k
            swap = torch.where(down == k, best, torch.where(down == best, k, down))
            a = a.gather(-2, swap.unsqueeze(-1).expand(a.shape))
            order = order.gather(-1, swap)
            swaps.append(best + 1)
        else:
            swaps.append(torch.full_like(order[..., :1], k + 1))
        head = a[..., k : k + 1, k]
        factor = torch.where((down > k) & (head != 0), a[..., :, k] / head, 0).unsqueeze(-1)
        row = torch.where(across > k, a[..., k : k + 1, :], 0)
        below = (down > k).unsqueeze(-1) & (across == k)
        a = torch.where(below, factor, a - factor * row)
    found = torch.cat(swaps, -1) if swaps else order[..., :0]
    return a, order, found.to(torch.int32)


@decomposes(aten.linalg_lu_factor_ex.default)
@_of_known_size
def lu_factor(
    a: Tensor, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    factors, _, swaps = _factorised(a, pivot)
    return factors, swaps, _no_error(a)


def _unpacked(factors: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = factors.shape[-2:]
    size = min(rows, columns)
    lower = factors[..., :, :size].tril(-1) + torch.eye(rows, size, dtype=factors.dtype)
    moves = order.unsqueeze(-2) == torch.arange(rows).unsqueeze(-1)
    return moves.to(factors.dtype), lower, factors[..., :size, :].triu()


@decomposes(aten.linalg_lu.default)
@_of_known_size
def lu(a: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    factors, order, _ = _factorised(a, pivot)
    moves, lower, upper = _unpacked(factors, order)
    return (moves if pivot else moves.new_empty(0)), lower, upper


def _order_of(swaps: Tensor, rows: int) -> Tensor:
    """The order of rows after LAPACK's swaps."""
    down = torch.arange(rows)
    order = down.expand(*swaps.shape[:-1], rows)
    for k in range(swaps.shape[-1]):
        best = swaps[..., k : k + 1].to(torch.int64) - 1
        swap = torch.where(down == k, best, torch.where(down == best, k, down))
        order = order.gather(-1, swap)
    return order


@decomposes(aten.lu_unpack.default)
@_of_known_size
def lu_unpack(
    factors: Tensor, swaps: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    order = _order_of(swaps, factors.shape[-2])
    nothing = factors.new_empty(0)
    moves, lower, upper = _unpacked(factors, order)
    data = (lower, upper) if unpack_data else (nothing, nothing)
    return (moves if unpack_pivots else nothing), *data


def _triangular(a: Tensor, b: Tensor, upper: bool, unitriangular: bool = False) -> Tensor:
    """Solve ``a @ x = b`` by substitution."""
    size = a.shape[-1]
    batch = _broadcast(a.shape[:-2], b.shape[:-2])
    a, x = a.expand(*batch, size, size), b.expand(*batch, *b.shape[-2:])
    down = torch.arange(size).unsqueeze(-1)
    for k in reversed(range(size)) if upper else range(size):
        row = x[..., k : k + 1, :]
        row = row if unitriangular else row / a[..., k : k + 1, k : k + 1]
        left = down < k if upper else down > k
        x = torch.where(left, x - a[..., :, k : k + 1] * row, torch.where(down == k, row, x))
    return x.clone() if not size else x


@decomposes(aten.linalg_solve_triangular.default)
@_of_known_size
def solve_triangular(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    if left:
        return _triangular(a, b, upper, unitriangular)
    return _triangular(a.mT, b.mT, not upper, unitriangular).mT


@decomposes(aten.triangular_solve.default)
def triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    if not isinstance(a.shape[-1], int) or a.shape[-1] > MOST_COLUMNS or a.is_complex():
        return NotImplemented
    turned, is_upper = (a.mT, not upper) if transpose else (a, upper)
    batch = _broadcast(a.shape[:-2], b.shape[:-2])
    return _triangular(turned, b, is_upper, unitriangular), a.expand(*batch, *a.shape[-2:]).clone()


def _reordered(b: Tensor, order: Tensor) -> Tensor:
    """The rows of ``b`` in ``order``, by a product: batches of both may broadcast."""
    moves = order.unsqueeze(-1) == torch.arange(order.shape[-1])
    return moves.to(b.dtype) @ b


def _solved(factors: Tensor, order: Tensor, b: Tensor) -> Tensor:
    """Solve with the factors of a matrix whose rows are in ``order``."""
    moved = _reordered(b, order)
    return _triangular(factors, _triangular(factors, moved, False, True), True)


@decomposes(aten.linalg_lu_solve.default)
@_of_known_size
def lu_solve(
    factors: Tensor, swaps: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False
) -> Tensor:
    order = _order_of(swaps, factors.shape[-1])
    if left and not adjoint:
        return _solved(factors, order, b)
    if not left:
        return lu_solve(factors, swaps, b.mT, adjoint=not adjoint).mT
    x = _triangular(factors.mT, _triangular(factors.mT, b, False), True, True)
    return _reordered(x, order.argsort(-1))


@decomposes(aten._linalg_solve_ex.default)
@_of_known_size
def solve(
    a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    factors, order, swaps = _factorised(a if left else a.mT)
    columns = b.unsqueeze(-1) if vector else b if left else b.mT
    x = _solved(factors, order, columns)
    return x.squeeze(-1) if vector else x if left else x.mT, factors, swaps, _no_error(a)


@decomposes(aten.linalg_inv_ex.default)
@_of_known_size
def inverse(a: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    factors, order, _ = _factorised(a)
    identity = torch.eye(a.shape[-1], dtype=a.dtype).expand(a.shape)
    return _solved(factors, order, identity), _no_error(a)


def _sign(swaps: Tensor, like: Tensor) -> Tensor:
    moved = swaps != torch.arange(1, swaps.shape[-1] + 1)
    return torch.where(moved, -1, 1).to(like.dtype).prod(-1)


@decomposes(aten._linalg_det.default)
@_of_known_size
def determinant(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    factors, _, swaps = _factorised(a)
    return factors.diagonal(0, -2, -1).prod(-1) * _sign(swaps, a), factors, swaps


@decomposes(aten.linalg_det.default)
@_of_known_size
def determinant_alone(a: Tensor) -> Tensor:
    return determinant(a)[0]


@decomposes(aten._linalg_slogdet.default)
@_of_known_size
def slogdet(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    factors, _, swaps = _factorised(a)
    diagonal = factors.diagonal(0, -2, -1)
    sign = diagonal.sign().prod(-1) * _sign(swaps, a)
    return sign, diagonal.abs().log().sum(-1), factors, swaps


@decomposes(aten.linalg_cholesky_ex.default)
@_of_known_size
def cholesky(
    a: Tensor, *, upper: bool = False, check_errors: bool = False
) -> tuple[Tensor, Tensor]:
    found = _cholesky(a.mT if upper else a)
    return found.mT if upper else found, _no_error(a)


def _cholesky(a: Tensor) -> Tensor:
    """The lower factor, from the lower triangle."""
    columns, down = [], torch.arange(a.shape[-1])
    for k in range(a.shape[-1]):
        root = a[..., k : k + 1, k].sqrt()
        below = torch.where(down > k, a[..., :, k] / root, 0)
        columns.append(torch.where(down == k, root, below))
        a = a - below.unsqueeze(-1) * below.unsqueeze(-2)
    return torch.stack(columns, -1) if columns else a.clone()


@decomposes(aten.cholesky.default)
@_of_known_size
def lower_or_upper(a: Tensor, upper: bool = False) -> Tensor:
    return cholesky(a, upper=upper)[0]


@decomposes(aten.cholesky_solve.default, aten._cholesky_solve_helper.default)
@_of_known_size
def cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Any:
    if factor.shape[-1] > MOST_COLUMNS:
        return NotImplemented
    lower = factor.mT if upper else factor
    return _triangular(lower.mT, _triangular(lower, b, False), True)


@decomposes(aten.cholesky_inverse.default)
@_of_known_size
def cholesky_inverse(factor: Tensor, upper: bool = False) -> Tensor:
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype).expand(factor.shape)
    found: Tensor = cholesky_solve(identity, factor, upper)
    return found


def _reflected(vector: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """``x`` less ``scale`` times ``vector`` times its products with the columns of ``x``."""
    return x - scale * vector.unsqueeze(-1) * (vector.unsqueeze(-2) @ x)


@decomposes(aten.linalg_qr.default)
@_of_known_size
def qr(a: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Householder's reflections, with LAPACK's signs."""
    rows, columns = a.shape[-2:]
    down, steps = torch.arange(rows), min(rows, columns)
    reflections = []
    for k in range(steps):
        x = torch.where(down >= k, a[..., :, k], 0)
        head = a[..., k : k + 1, k]
        rest = torch.where(down > k, x, 0).square().sum(-1, keepdim=True)
        norm = torch.where(head < 0, 1, -1) * (head.square() + rest).sqrt()
        vector = torch.where(down == k, head - norm, x)
        length = vector.square().sum(-1, keepdim=True)
        flat = rest == 0  # LAPACK leaves such a column as it is
        scale = torch.where(flat, 0, 2 / torch.where(flat, 1, length)).unsqueeze(-1)
        a = _reflected(vector, scale, a)
        reflections.append((vector, scale))
    kept = rows if mode == "complete" else steps
    upper = a[..., :kept, :].triu()
    if mode == "r":
        return a.new_empty(0), upper
    q = torch.eye(rows, kept, dtype=a.dtype).expand(*a.shape[:-2], rows, kept)
    for vector, scale in reversed(reflections):
        q = _reflected(vector, scale, q)
    return q.clone() if not reflections else q, upper


def _householder_vectors(a: Tensor, tau: Tensor) -> list[tuple[Tensor, Tensor]]:
    down = torch.arange(a.shape[-2])
    return [
        (
            torch.where(down > k, a[..., :, k], (down == k).to(a.dtype)),
            tau[..., k : k + 1].unsqueeze(-1),
        )
        for k in range(tau.shape[-1])
    ]


@decomposes(aten.linalg_householder_product.default)
@_of_known_size
def householder_product(a: Tensor, tau: Tensor) -> Tensor:
    q = torch.eye(*a.shape[-2:], dtype=a.dtype).expand(a.shape)
    for vector, scale in reversed(_householder_vectors(a, tau)):
        q = _reflected(vector, scale, q)
    return q + 0


@decomposes(aten.ormqr.default)
@_of_known_size
def ormqr(
    a: Tensor, tau: Tensor, other: Tensor, left: bool = True, transpose: bool = False
) -> Tensor:
    x = other if left else other.mT
    vectors = _householder_vectors(a, tau)
    for vector, scale in vectors if left == transpose else reversed(vectors):
        x = _reflected(vector, scale, x)
    return (x if left else x.mT) + 0


@decomposes(aten.linalg_matrix_exp.default)
@_of_known_size
def matrix_exp(a: Tensor) -> Tensor:
    """Taylor's series of a fraction of the matrix, squared as often as it was halved."""
    halvings, terms = 6, 16
    small = a / 2**halvings
    identity = torch.eye(a.shape[-1], dtype=a.dtype).expand(a.shape)
    total = term = identity
    for k in range(1, terms):
        term = term @ small / k
        total = total + term
    for _ in range(halvings):
        total = total @ total
    return total + 0
