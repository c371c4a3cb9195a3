"""Runs of a module that tell more than its answers: variants that rounding alone could give, to
judge how exact the answers are, and the operators that select, or mix the rows of a batch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from modelport.exporters.loaded_model import Reference
from modelport.exporters.sources.torch_eager import TorchEager
from modelport.gateway.types import Array, ModelSignature

aten = torch.ops.aten

#: Operators that select along a dimension: the dimension of a call from its arguments.
SELECTIONS: Mapping[Any, Callable[..., int | None]] = {
    aten.topk.default: lambda x, k, dim=-1, *_, **__: dim,
    aten.sort.default: lambda x, dim=-1, *_, **__: dim,
    aten.sort.stable: lambda x, *, stable, dim=-1, descending=False: dim,
    aten.max.dim: lambda x, dim, *_, **__: dim,
    aten.min.dim: lambda x, dim, *_, **__: dim,
    aten.kthvalue.default: lambda x, k, dim=-1, *_, **__: dim,
    aten.median.dim: lambda x, dim, *_, **__: dim,
    aten.argmax.default: lambda x, dim=None, *_, **__: dim,
    aten.argmin.default: lambda x, dim=None, *_, **__: dim,
}
#: Operators whose result jumps where their first argument passes a number.
THRESHOLDS = frozenset(
    getattr(getattr(aten, name), overload)
    for name, overloads in {
        **dict.fromkeys(("gt", "ge", "lt", "le"), ("Scalar", "Tensor")),
        **dict.fromkeys(("round", "floor", "ceil", "trunc", "sign"), ("default",)),
    }.items()
    for overload in overloads
)
#: Operators that add up products.
PRODUCTS = frozenset(
    (
        *("mm", "bmm", "mv", "addmm", "baddbmm", "addmv", "matmul", "linear", "einsum"),
        "convolution",
        *(f"conv{'_transpose' * reverse}{axes}d" for axes in (1, 2, 3) for reverse in (0, 1)),
    )
)
RANDOM_SHIFTS = 6
ULP_VARIANTS = 4


class TorchDiagnostics:
    """The variants of one module."""

    def __init__(self, module: nn.Module, signature: ModelSignature) -> None:
        self._module = module
        self._signature = signature

    def other_branches(
        self, inputs: Mapping[str, Array], atol: float, rtol: float
    ) -> Iterator[dict[str, Array]]:
        """Answers to ``inputs`` if the values that a branch is taken by move within a tolerance:
        towards the first of equal values, the last, and at random."""
        run = TorchEager(self._module, self._signature)
        for shift in (_first, _last, *map(_random, range(RANDOM_SHIFTS))):
            with torch.random.fork_rng(devices=[]), ShiftedBranches(shift, atol, rtol):
                yield run(inputs)

    def selections(self, inputs: Mapping[str, Array]) -> list[tuple[Array, Array, int]]:
        """The values, indices and dimension of each operator that selects, indices with that
        dimension."""
        with RecordedSelections() as recorder:
            TorchEager(self._module, self._signature)(inputs)
        return list(recorder.found)

    def rounded_otherwise(self) -> Iterator[tuple[str, Callable[[], Reference]]]:
        """The module in float64, with every weight moved by one unit in the last place, and with
        every result of a product moved so.

        Weights do not tell how a normalisation widens the rounding of equal values: a convolution
        of a constant image gives them, however its weights are moved.
        """
        yield "float64", lambda: TorchEager(_InFloat64(self._module), self._signature)
        for seed in range(ULP_VARIANTS):
            yield "weights moved by one ulp", functools.partial(self._with_moved_weights, seed)
        for seed in range(ULP_VARIANTS):
            yield "products moved by one ulp", functools.partial(self._with_moved_products, seed)

    def first_mixing(
        self, inputs: Mapping[str, Array], others: Mapping[str, Array], kept: Array
    ) -> str:
        """The first operator that gives the ``kept`` rows, which both inputs share, other values;
        or mixes all rows. Empty if none is found."""
        runs: list[list[tuple[str, Tensor]]] = []
        for given in (inputs, others):
            with RecordedResults() as recorder:
                TorchEager(self._module, self._signature)(given)
            runs.append(recorder.found)
        rows = torch.from_numpy(np.flatnonzero(kept))
        for (name, first), (_, second) in zip(runs[0], runs[1], strict=False):
            if not _agree(first, second, rows, len(kept)):
                return name
        return ""

    def _with_moved_weights(self, seed: int) -> Reference:
        moved = copy.deepcopy(self._module)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in (*moved.parameters(), *moved.buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(_moved(tensor, generator))
        return TorchEager(moved, self._signature)

    def _with_moved_products(self, seed: int) -> Reference:
        run = TorchEager(self._module, self._signature)

        def moved(inputs: Mapping[str, Array]) -> dict[str, Array]:
            with MovedProducts(seed):
                return run(inputs)

        return moved


class _InFloat64(nn.Module):
    """A copy of a module that takes and computes float64 in place of all other floats."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._wide = copy.deepcopy(module).double()

    def forward(self, *inputs: Tensor) -> Any:
        return self._wide(*(x.double() if x.is_floating_point() else x for x in inputs))


def _moved(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """``tensor`` with each value but 0 moved up or down by one unit in the last place."""
    step = torch.finfo(tensor.dtype).eps / 2
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    wide = tensor.double()
    _, exponents = torch.frexp(wide)
    moved = wide + signs * torch.ldexp(torch.full_like(wide, 2 * step), exponents - 1)
    return torch.where(tensor == 0, tensor, moved.to(tensor.dtype))


class MovedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves the results of operators that add up products, in an order that kernels choose."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func.overloadpacket).removeprefix("aten.") not in PRODUCTS:
            return result
        return _moved(result, self._generator) if result.is_floating_point() else result


#: Shifts of values by their tolerance, -1 to 1, along the dimension that an operator selects in;
#: None for thresholds.
Shift = Callable[[Tensor, int | None], Tensor]


def _first(x: Tensor, dim: int | None) -> Tensor:
    """1 at the first index to -1 at the last."""
    if dim is None or not x.dim():
        return torch.ones_like(x)
    around = [1] * x.dim()
    around[dim] = x.shape[dim]
    return torch.linspace(1, -1, x.shape[dim], dtype=x.dtype).reshape(around)


def _last(x: Tensor, dim: int | None) -> Tensor:
    return -_first(x, dim)


def _random(seed: int) -> Shift:
    generator = torch.Generator().manual_seed(seed)

    def shift(x: Tensor, dim: int | None) -> Tensor:
        return (torch.rand(x.shape, generator=generator) * 2 - 1).to(x.dtype)

    return shift


class ShiftedBranches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves the values that a branch is taken by, each by at most its tolerance."""

    def __init__(self, shift: Shift, atol: float, rtol: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shift, self._atol, self._rtol = shift, atol, rtol

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        selects = func in SELECTIONS
        floats = args and isinstance(args[0], Tensor) and args[0].is_floating_point()
        if not (floats and (selects or func in THRESHOLDS)):
            return func(*args, **kwargs)
        x, rest = args[0], args[1:]
        dim = SELECTIONS[func](*args, **kwargs) if selects else None
        if selects and dim is None:  # among all values
            shift = self._shift(x.reshape(-1), 0).reshape(x.shape)
        else:
            shift = self._shift(x, dim)
        moved = x + shift * (self._atol + self._rtol * x.abs())
        result = func(moved, *rest, **kwargs)
        if selects and isinstance(result, tuple | list):  # the values are x's own
            indices = result[1]
            return _taken(x, indices, dim or 0), indices
        return result


def _taken(x: Tensor, indices: Tensor, dim: int) -> Tensor:
    if indices.dim() == x.dim():
        return torch.gather(x, dim, indices)
    return torch.gather(x, dim, indices.unsqueeze(dim)).squeeze(dim)


def _agree(first: Tensor, second: Tensor, rows: Tensor, batch: int) -> bool:
    """Whether two results are equal in ``rows`` of a dimension that holds the batch."""
    if first.shape != second.shape:
        return False
    for dim, size in enumerate(first.shape):
        if size and size % batch == 0:
            shape = (*first.shape[:dim], batch, -1, *first.shape[dim + 1 :])
            ours, theirs = (x.reshape(shape).index_select(dim, rows) for x in (first, second))
            if torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True):
                return True
    return torch.allclose(first, second, rtol=1e-4, atol=1e-5, equal_nan=True)


class RecordedResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the results of operators that are tensors of numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor) and value.layout is torch.strided:
                wide = value.double() if not value.is_complex() else torch.view_as_real(value)
                self.found.append((str(func.overloadpacket), wide))
        return result


class RecordedSelections(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the values and the indices of operators that select."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[Array, Array, int]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in SELECTIONS and args[0].is_floating_point() and args[0].dim():
            dim = SELECTIONS[func](*args, **(kwargs or {}))
            values = args[0] if dim is not None else args[0].reshape(-1)
            indices = result[1] if isinstance(result, tuple | list) else result
            if dim is None or indices.dim() < values.dim():
                indices = indices.reshape(-1) if dim is None else indices.unsqueeze(dim)
            self.found.append((values.numpy(), indices.numpy(), dim or 0))
        return result
