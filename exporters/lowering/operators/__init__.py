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
for _name in list(OPERATORS):
    # A view and its copy have the same values.
    _packet, _dot, _overload = _name.partition(".")
    OPERATORS.setdefault(f"{_packet}_copy{_dot}{_overload}", OPERATORS[_name])

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
