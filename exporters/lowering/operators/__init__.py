"""Lowerings of operators, by topic; importing this fills the table."""

from __future__ import annotations

from modelport.exporters.lowering.operators import (
    activations,
    arithmetic,
    attention,
    comparison,
    control_flow,
    convolution,
    creation,
    indexing,
    interpolation,
    layout,
    normalization,
    padding,
    pooling,
    products,
    recurrent,
    reductions,
    sampling,
    scattering,
    shapes,
    sorting,
    spectral,
    symbolic,
)
from modelport.exporters.lowering.registry import OPERATORS

layout.keep_layouts(OPERATORS)
for _name in ("as_strided", "view"):  # a copy of a view has its values
    OPERATORS[f"{_name}_copy"] = OPERATORS[_name]

__all__ = [
    "OPERATORS",
    "activations",
    "arithmetic",
    "attention",
    "comparison",
    "control_flow",
    "convolution",
    "creation",
    "indexing",
    "interpolation",
    "layout",
    "normalization",
    "padding",
    "pooling",
    "products",
    "recurrent",
    "reductions",
    "sampling",
    "scattering",
    "shapes",
    "sorting",
    "spectral",
    "symbolic",
]
