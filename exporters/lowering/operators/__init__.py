"""Lowerings of operators, by topic; importing this fills the table."""

from __future__ import annotations

from modelport.exporters.lowering.operators import (
    arithmetic,
    comparison,
    creation,
    padding,
    products,
    reductions,
    shapes,
    symbolic,
)
from modelport.exporters.lowering.registry import OPERATORS

__all__ = [
    "OPERATORS",
    "arithmetic",
    "comparison",
    "creation",
    "padding",
    "products",
    "reductions",
    "shapes",
    "symbolic",
]
