"""Decompositions compute what PyTorch's operators compute, on PyTorch's own samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from modelport.exporters.decompositions import BUILT_IN, DECOMPOSITIONS
from modelport.exporters.decompositions.composites import COMPOSITES
from tests.sweep.opinfo import DTYPES, operators

#: Samples of each function.
SAMPLES = 12

#: Results that count: the place of one of equal elements is open, as are factors beside a result.
COUNTED = {
    **dict.fromkeys(("kthvalue", "median", "mode", "nanmedian", "sort", "_linalg_det"), 1),
    "_linalg_slogdet": 2,
}


class BesideOperators(TorchDispatchMode):
    """Runs the decomposition of each operator beside the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.compared: set[str] = set()
        self.different: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        function = (COMPOSITES | DECOMPOSITIONS | BUILT_IN).get(func)
        given = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        expected = func(*args, **kwargs)
        found = NotImplemented if function is None else function(*given[0], **given[1])
        if found is not NotImplemented:
            self.compared.add(str(func))
            self.check(str(func), expected, found)
        return expected

    def check(self, name: str, expected: Any, found: Any) -> None:
        theirs, ours = pytree.tree_leaves(expected), pytree.tree_leaves(found)
        counted = COUNTED.get(name.split(".")[1], len(theirs)) if "." in name else len(theirs)
        theirs, ours = theirs[:counted], ours[:counted]
        for x, y in zip(theirs, ours, strict=True):
            same = x.dtype == y.dtype and x.shape == y.shape
            if not same or not torch.allclose(x, y, 1e-3, 1e-4, equal_nan=True):
                self.different.append(f"{name}: {y} in place of {x}"[:300])


#: Functions whose samples reach the decompositions.
FUNCTIONS = (
    *("acosh", "amax", "amin", "asinh", "atanh", "cosh", "erfc", "nonzero_static", "sinh"),
    *("special.erfcx", "squeeze", "tan", "native_batch_norm"),
    *("bucketize", "cdist", "cholesky_inverse", "cholesky_solve", "copysign"),
    *("cummax", "cummin", "cumprod", "diagonal_scatter", "digamma", "erfinv", "fmax", "fmin"),
    *("frexp", "gcd", "hypot", "i0", "index_reduce.mean", "kthvalue", "lcm", "lgamma"),
    *("linalg.cholesky", "linalg.det", "linalg.householder_product", "linalg.inv", "linalg.lu"),
    *("linalg.lu_factor", "linalg.lu_solve", "linalg.qr", "linalg.slogdet", "linalg.solve"),
    *("linalg.solve_triangular", "lu_unpack", "median", "mode", "nanmedian", "ormqr"),
    *("nn.functional.adaptive_avg_pool3d", "nn.functional.adaptive_max_pool2d"),
    *("nn.functional.bilinear", "nn.functional.pdist", "polygamma.polygamma_n_1", "put"),
    *("scatter_reduce.mean", "scatter_reduce.prod", "searchsorted", "signbit", "sort"),
    *("special.i0e", "special.i1e", "special.ndtri", "std_mean", "take", "triangular_solve"),
)


def calls(name: str) -> Iterator[Any]:
    info = operators()[name]
    for dtype in DTYPES:
        if dtype in info.dtypes:
            torch.manual_seed(0)
            made = info.sample_inputs_func(info, "cpu", dtype, requires_grad=False)
            yield from itertools.islice(made, SAMPLES)


@cache
def compared(name: str) -> BesideOperators:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    comparison = BesideOperators()
    with torch.no_grad():
        for sample in calls(name):
            with comparison:
                operators()[name](sample.input, *sample.args, **sample.kwargs)
    torch.set_num_threads(threads)
    return comparison


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_decomposition_computes_what_the_operator_computes(name: str) -> None:
    found = compared(name)
    assert found.compared
    assert found.different == []


def test_the_comparison_finds_a_wrong_value_and_a_wrong_datatype() -> None:
    x = torch.ones(2)
    for wrong in (x + 1, x.double(), x[:1]):
        comparison = BesideOperators()
        comparison.check("operator", x, wrong)
        assert comparison.different


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["combinations", "corrcoef", "cov", "isclose", "narrow"])
def test_a_traceable_variant_computes_what_the_function_computes(name: str) -> None:
    variants = {str(k): function for k, function in (COMPOSITES | DECOMPOSITIONS).items()}
    overload = f"aten.{name}.{'Tensor' if name == 'narrow' else 'default'}"
    seen = 0
    for sample in calls(name):
        if name == "narrow" and not isinstance(sample.args[1], torch.Tensor):
            continue
        expected = operators()[name](sample.input, *sample.args, **sample.kwargs)
        found = variants[overload](sample.input, *sample.args, **sample.kwargs)
        torch.testing.assert_close(found, expected, equal_nan=True)
        seen += 1
    assert seen
