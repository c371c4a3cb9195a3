"""Rounding decides ties and thresholds, and moves sensitive models; nothing else is forgiven."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modelport.exporters.errors import ParityError
from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.proof import parity
from modelport.exporters.proof.parity_report import ParityReport
from modelport.exporters.sources.pytorch import source
from modelport.exporters.sources.torch_eager import inference_mode, named_tensors
from modelport.gateway.types import Array, Datatype, ModelSignature, TensorSpec

X = TensorSpec("x", Datatype.FP32, (6,), -1, 1)


class Another:
    """A second implementation of a module: ``answer`` may compute in another way."""

    def __init__(self, signature: ModelSignature, answer: Callable[[Tensor], Any]) -> None:
        self.inputs = [spec.name for spec in signature.inputs]
        self.outputs = [spec.name for spec in signature.outputs]
        self._answer = answer

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        with inference_mode(nn.Identity()):
            found = named_tensors(self._answer(torch.tensor(inputs["x"])))
        return {n: v.numpy() for n, v in zip(self.outputs, found.values(), strict=True)}


class Computes(nn.Module):
    """``forward(x)`` is ``function(x)``, with weights that the function may use."""

    def __init__(self, function: Callable[..., Any], *weights: float) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.tensor(float(w)) for w in weights)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.weights)


def prove(
    module: nn.Module,
    answer: Callable[[Tensor], Any],
    *outputs: tuple[Datatype, tuple[int, ...]],
    samples: int = 60,
    batch: int = 4,
) -> ParityReport:
    declared = tuple(
        TensorSpec(f"y{i}", datatype, dims) for i, (datatype, dims) in enumerate(outputs)
    )
    signature = ModelSignature((X,), declared, batch)
    spec = ModelSpec("m", lambda *_: signature)
    return parity.check(
        source(module, spec, signature),
        Another(signature, answer),
        samples=samples,
        seed=0,
        atol=1e-5,
        rtol=1e-4,
    )


def coarse(x: Tensor) -> Tensor:
    """Values of which many are equal."""
    return (x * 2).round() / 2


def last_of_equals(x: Tensor) -> Tensor:
    """The indices of a descending sort that puts the last of equal values first."""
    return x.shape[-1] - 1 - torch.sort(x.flip(-1), dim=-1, descending=True, stable=True)[1]


FLOATS, INDICES = (Datatype.FP32, (6,)), (Datatype.INT64, (6,))
TWO, TWO_INDICES = (Datatype.FP32, (2,)), (Datatype.INT64, (2,))
ONE_INDEX = (Datatype.INT64, (1,))


def test_indices_may_differ_where_the_values_are_equal() -> None:
    prove(
        Computes(lambda x: torch.sort(coarse(x), dim=-1, descending=True, stable=True)),
        lambda x: (coarse(x).sort(-1, descending=True)[0], last_of_equals(coarse(x))),
        FLOATS,
        INDICES,
    )
    prove(
        Computes(lambda x: torch.topk(coarse(x), 2)),
        lambda x: (coarse(x).sort(-1, descending=True)[0][:, :2], last_of_equals(coarse(x))[:, :2]),
        TWO,
        TWO_INDICES,
    )
    prove(
        Computes(lambda x: coarse(x).argmax(-1, keepdim=True)),
        lambda x: last_of_equals(coarse(x))[:, :1],
        ONE_INDEX,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: last_of_equals(coarse(x)).flip(-1),  # the smallest first
        lambda x: last_of_equals(coarse(x))[:, :1].expand(-1, 6),  # one index again and again
        lambda x: last_of_equals(coarse(x)) + 6,
        lambda x: torch.zeros_like(last_of_equals(coarse(x))),
    ],
    ids=["reversed", "repeated", "beyond", "zero"],
)
def test_other_indices_are_refused(wrong: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ParityError, match="output 'y0' differs"):
        prove(Computes(lambda x: torch.sort(coarse(x), -1, descending=True)[1]), wrong, INDICES)


def routed(x: Tensor, index: Tensor) -> Tensor:
    """One of two experts for each row."""
    return torch.where(index[:, None] == 0, x * 3, x - 2)


def test_a_branch_may_go_the_other_way_at_a_tie_alone() -> None:
    def scores(x: Tensor) -> Tensor:
        return torch.stack([coarse(x[:, 0]), coarse(x[:, 1])], -1)

    module = Computes(lambda x: routed(x, scores(x).argmax(-1)))
    report = prove(module, lambda x: routed(x, last_of_equals(scores(x))[:, 0]), FLOATS)
    assert report.branched_samples > 5
    assert report.max_abs_error < 1e-5
    with pytest.raises(ParityError, match="output 'y0' differs"):
        prove(module, lambda x: routed(x, 1 - scores(x).argmax(-1)), FLOATS)
    with pytest.raises(ParityError, match="output 'y0' differs"):  # wrong beside the branch
        prove(module, lambda x: routed(x, last_of_equals(scores(x))[:, 0]) + 1e-3, FLOATS)


@pytest.mark.parametrize(("shift", "passes"), [(3e-6, True), (-3e-6, True), (0.6, False)])
def test_a_threshold_may_move_within_the_tolerance(shift: float, passes: bool) -> None:
    module = Computes(lambda x: (coarse(x) > 0).float() * x.abs())
    answer = Computes(lambda x: (coarse(x) + shift > 0).float() * x.abs())
    if passes:
        assert prove(module, answer, FLOATS).branched_samples >= (shift > 0)
        return
    with pytest.raises(ParityError, match="output 'y0' differs"):
        prove(module, answer, FLOATS)


def test_a_model_without_batches_is_taken_as_one_row() -> None:
    report = prove(
        Computes(lambda x: x[coarse(x).argmax(-1)].reshape(1)),
        lambda x: x[last_of_equals(coarse(x))[0]].reshape(1),
        (Datatype.FP32, (1,)),
        batch=0,
        samples=300,
    )
    assert report.branched_samples > 1


def chaotic(x: Tensor, rate: Tensor, steps: int = 13) -> Tensor:
    """The logistic map, which doubles an error at each step."""
    y = (x + 1.1) / 2.2
    for _ in range(steps):
        y = rate * y * (1 - y)
    return y


def rearranged(x: Tensor, rate: Tensor, steps: int = 13) -> Tensor:
    """The same in another order of operations, as a runtime may choose."""
    y = (x + 1.1) / 2.2
    for _ in range(steps):
        y = rate * (y - y * y)
    return y


def test_a_sensitive_model_is_held_to_its_own_rounding_and_the_report_says_so() -> None:
    module = Computes(chaotic, 3.99)
    report = prove(module, lambda x: rearranged(x, module.weights[0]), FLOATS)
    found = report.conditioning["y0"]
    assert found.worst > 1
    assert 1 < report.outputs["y0"].worst_ratio <= found.tolerance <= found.cap
    assert "one ulp" in found.measured
    assert "float64" in found.measured


def flat(x: Tensor, weight: Tensor, rounding: float = 0.0) -> Tensor:
    """A normalised convolution of equal values, which nothing but rounding tells apart."""
    image = torch.full_like(x, 0.7)[:, None]
    found = nn.functional.conv1d(image, weight.reshape(1, 1, 1))[:, 0]
    found = found * (1 + rounding * torch.tensor([1.0, -1, 1, -1, 1, -1]))
    return nn.functional.layer_norm(found, (6,), eps=1e-6) + x


def test_a_normalisation_of_equal_values_widens_their_rounding() -> None:
    module = Computes(flat, 1.1)
    report = prove(module, lambda x: flat(x, module.weights[0], 1e-7), FLOATS)
    assert report.outputs["y0"].worst_ratio > 1
    assert "products moved" in report.conditioning["y0"].measured
    with pytest.raises(ParityError, match="output 'y0' differs"):
        prove(module, lambda x: flat(x, module.weights[0], 1e-5), FLOATS)


@pytest.mark.parametrize("relative", [1e-5, 1e-3])
def test_a_wrong_weight_of_a_sensitive_model_is_refused(relative: float) -> None:
    module = Computes(chaotic, 3.99)
    with pytest.raises(ParityError, match=r"rounding alone .* moves the model by"):
        prove(module, lambda x: chaotic(x, module.weights[0] * (1 + relative)), FLOATS)


def test_a_model_more_sensitive_than_the_cap_cannot_be_proven() -> None:
    module = Computes(lambda x, rate: chaotic(x, rate, 40), 3.99)
    with pytest.raises(ParityError, match="at most 100 times are accepted"):
        prove(module, lambda x: rearranged(x, module.weights[0], 40), FLOATS)


def test_a_well_conditioned_model_is_held_to_the_tolerance() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    other = copy.deepcopy(module)
    assert prove(module, other, FLOATS).conditioning == {}
    with torch.no_grad():
        other[0].weight[3, 2] += 3e-4
    with pytest.raises(ParityError, match=r"values outside; correct the model"):
        prove(module, other, FLOATS)


class Half(nn.Module):
    """A layer in half precision between float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6).half()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x.half()).float()
        return result


def test_half_precision_is_held_to_the_noise_of_half_precision() -> None:
    module = Half()
    weight, bias = (p.float() for p in module.layer.parameters())
    report = prove(module, lambda x: (x @ weight.T + bias).half().float(), FLOATS)
    assert report.outputs["y0"].worst_ratio > 1
    assert "one ulp" in report.conditioning["y0"].measured
    with pytest.raises(ParityError, match="differs"):
        prove(module, lambda x: (x @ weight.T * 1.05 + bias).half().float(), FLOATS)


def test_a_weight_moves_by_one_ulp() -> None:
    from modelport.exporters.sources.torch_diagnostics import _moved

    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        values = torch.tensor([1.0, -1.5, 0.0, 3.0, 1e-3, 1000.0], dtype=dtype)
        moved = _moved(values, torch.Generator().manual_seed(0))
        up = torch.nextafter(values.double(), torch.tensor(torch.inf, dtype=torch.float64))
        assert moved[2] == 0
        assert (moved != values)[[0, 1, 3, 4, 5]].all()
        relative = ((moved - values) / values).double()[[0, 1, 3, 4, 5]].abs()
        assert (relative <= 2 * torch.finfo(dtype).eps).all()
        assert up.dtype is torch.float64
    assert np.isfinite(moved.numpy()).all()
