"""Operators of PyTorch that the formats lack, by operators that they have.

Each is a function of PyTorch. torch.onnx has no translation of these operators, or a wrong one;
TensorFlow uses the decomposition of those that ``exporters.lowering`` has no table entry for.
"""

from __future__ import annotations

from modelport.exporters.decompositions import (
    built_in,
    complex_parts,
    convolution,
    elementwise,
    linear_algebra,
    pooling,
    scattering,
    selection,
    special,
    statistics,
)
from modelport.exporters.decompositions.table import BUILT_IN, COMPLEX, DECOMPOSITIONS

__all__ = [
    "BUILT_IN",
    "COMPLEX",
    "DECOMPOSITIONS",
    "built_in",
    "complex_parts",
    "convolution",
    "elementwise",
    "linear_algebra",
    "pooling",
    "scattering",
    "selection",
    "special",
    "statistics",
]
