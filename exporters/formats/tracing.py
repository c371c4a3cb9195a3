"""Shared parts of routes that trace an ``nn.Module``: example inputs, dynamic dims, precision."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelport.exporters.model_spec import AttentionMask
from modelport.exporters.requests.random_inputs import draw, model_dims, name_axes, sizes_of
from modelport.exporters.sources.torch_eager import as_tensors
from modelport.gateway.types import NUMPY_DTYPES, Axis, ModelSignature

EXAMPLE_BATCH = 2  # torch.export treats a size of 1 as a constant

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def example_inputs(
    signature: ModelSignature, masks: Sequence[AttentionMask] = ()
) -> tuple[Tensor, ...]:
    """One batch of two, in the order of ``forward``'s arguments, with every axis at a middle
    size."""
    signature = name_axes(signature)
    sizes, rng = _example_sizes(signature), np.random.default_rng(0)
    example = draw(signature, EXAMPLE_BATCH, sizes, rng, masks=masks)
    return tuple(torch.from_numpy(array) for array in example.values())


def _example_sizes(signature: ModelSignature) -> dict[str, int]:
    """A middle size of each axis, all different: equal sizes would count as one dimension."""
    sizes: dict[str, int] = {}
    for name, axis in signature.axes.items():
        taken = {EXAMPLE_BATCH, *sizes.values()}
        middle = sizes_of(axis)[len(sizes_of(axis)) // 2]
        longest = axis.maximum or middle
        free = (size for size in range(max(2, middle), longest + 1) if size not in taken)
        sizes[name] = next(free, middle)
    return sizes


def dynamic_shapes(signature: ModelSignature, module: nn.Module) -> tuple[Any, ...]:
    """``torch.export``'s dynamic shapes: the batch, and every axis that has more than one size.

    There is one entry for each of ``module``'s arguments.
    """
    signature = name_axes(signature)
    name = "batch" if "batch" not in signature.axes else "batch_size"
    batch = torch.export.Dim(name, min=1, max=max(EXAMPLE_BATCH, signature.max_batch_size))
    axes = {name: _dim(axis) for name, axis in signature.axes.items()}
    offset = 1 if signature.max_batch_size else 0
    shapes = []
    for spec in signature.inputs:
        dims = enumerate(model_dims(spec), start=offset)
        shape = {i: axes[dim] for i, dim in dims if isinstance(dim, str) and axes[dim] is not None}
        shapes.append({0: batch, **shape} if offset else shape)
    # The number of ``forward``'s arguments before its variadic one; None: it has none.
    kinds = [a.kind for a in inspect.signature(module.forward).parameters.values()]
    variadic = inspect.Parameter.VAR_POSITIONAL
    single = kinds.index(variadic) if variadic in kinds else None
    return tuple(shapes) if single is None else (*shapes[:single], tuple(shapes[single:]))


def _dim(axis: Axis) -> Any:
    """The dynamic dim of an axis; None if it has a single size."""
    if axis.minimum == axis.maximum:
        return None
    return torch.export.Dim(axis.name, min=axis.minimum, max=axis.maximum)


class Recast(nn.Module):
    """A module that computes in another precision, with the original inputs and outputs."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, signature: ModelSignature) -> None:
        super().__init__()
        self.module = module.to(dtype)
        self._dtype = dtype
        self._outputs = [_torch_dtype(spec.datatype) for spec in signature.outputs]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        cast = (x.to(self._dtype) if x.is_floating_point() else x for x in inputs)
        results = as_tensors(self.module(*cast))
        return tuple(x.to(dtype) for x, dtype in zip(results, self._outputs, strict=True))


def _torch_dtype(datatype: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, NUMPY_DTYPES[datatype])).dtype


def at_precision(module: nn.Module, dtype: str, signature: ModelSignature) -> nn.Module:
    """``module`` itself for ``fp32``; otherwise a recast copy."""
    if dtype == "fp32":
        return module
    return Recast(copy.deepcopy(module), TORCH_DTYPES[dtype], signature).eval()
