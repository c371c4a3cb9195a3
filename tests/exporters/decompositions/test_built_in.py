"""Functions that TFLite lacks are right over their whole range, and mended operators convert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from modelport.exporters.decompositions import BUILT_IN, DECOMPOSITIONS
from tests.sweep import operators, opinfo

aten = torch.ops.aten

#: A result below is no normal number of float32, one above none at all.
SMALLEST, LARGEST = 1.2e-38, 3.4e38

FUNCTIONS = {**BUILT_IN, aten.special_erfcx.default: DECOMPOSITIONS[aten.special_erfcx.default]}


def arguments() -> Tensor:
    sizes = torch.cat([torch.logspace(-30, 2, 2000), torch.linspace(0, 12, 20_001)])
    special = torch.tensor([0.0, 1.0, torch.inf, torch.nan, 1e30])
    return torch.cat([sizes, -sizes, special, -special])


def worst(function: Callable[[Tensor], Tensor], operator: Any) -> float:
    """The largest relative error where float32 holds the result; infinite if infinities differ."""
    x = arguments()
    if operator is aten.tan.default:  # further turns lose digits in float32
        x = x[x.abs() < 100]
    if operator is aten.special_ndtr.default:  # the tail below asks for digits that x does not have
        x = x[x > -4]
    found, expected = function(x).double(), operator(x.double())
    held = expected.isfinite() & (expected.abs() > SMALLEST) & (expected.abs() < LARGEST)
    rest = found[expected.isnan()].isnan().all() and not found[held].isnan().any()
    same = found[expected.isinf()] == expected[expected.isinf()]
    if not (rest and same.all()):
        return torch.inf
    return float(((found - expected).abs() / expected.abs())[held].max())


@pytest.mark.parametrize("operator", FUNCTIONS, ids=str)
def test_a_function_has_the_precision_of_float32_over_its_whole_range(operator: Any) -> None:
    limit = 1e-5 if "erf" in str(operator) or "ndtr" in str(operator) else 1e-6
    assert worst(FUNCTIONS[operator], operator) < limit


@pytest.mark.parametrize(
    ("operator", "wrong"),
    [
        (aten.sinh.default, lambda x: (x.exp() - (-x).exp()) / 2),
        (aten.asinh.default, lambda x: (x + (x * x + 1).sqrt()).log()),
        (aten.atanh.default, lambda x: ((1 + x) / (1 - x)).log() / 2),
        (aten.erfc.default, lambda x: 1 - torch.erf(x)),
        (aten.special_erfcx.default, lambda x: (x * x).exp() * torch.erfc(x)),
    ],
    ids=("sinh", "asinh", "atanh", "erfc", "erfcx"),
)
def test_the_plain_formula_of_a_function_is_found_wrong(operator: Any, wrong: Any) -> None:
    assert worst(wrong, operator) > 1e-4


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("format_name", "name"),
    [
        *(("onnx", name) for name in ("linalg.norm", "squeeze", "square", "native_group_norm")),
        *(("onnx", name) for name in ("native_batch_norm", "_native_batch_norm_legit")),
        *(("onnx", name) for name in ("nonzero_static", "special.erfcx")),
        *(("savedmodel", name) for name in ("linalg.lu", "nonzero_static", "special.erfcx")),
        *(("tflite", name) for name in ("acosh", "asinh", "atanh", "cosh", "erfc", "sinh", "tan")),
        *(("tflite", name) for name in ("special.erfcx", "special.ndtr", "unbind")),
    ],
)
def test_an_operator_that_was_refused_or_wrong_is_right(format_name: str, name: str) -> None:
    for dtype in opinfo.DTYPES:
        if dtype in opinfo.operators()[name].dtypes:
            samples = opinfo.samples(name, dtype)
            if format_name == "tflite":
                samples = opinfo.without_empty_inputs(samples)
            assert operators.tried(name, samples, format_name) == ("right", "")
