"""Code that turns a size into a number: the artifact takes every size, or the refusal names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import find_format
from modelport.exporters.sources.torch_eager import inference_mode
from modelport.gateway.cli.errors import exit_code
from modelport.gateway.errors import Unsupported
from modelport.gateway.types import Axis, ModelSignature
from tests.torch_subjects import fp32, subject, worst

SIZES = {"n": Axis("n", 4, 12)}
MORE = ("onnx", "savedmodel", "tflite")


class CountsSteps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / len(x[0])


class Windows(nn.Module):
    """Windows of 16 steps; no input has a second one."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, i : min(x.shape[1], i + 16)] for i in range(0, x.shape[1], 16)]
        return torch.cat([part - part.mean(1, keepdim=True) for part in parts], 1)


class PoolsSteps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pooled = functional.max_pool1d(x[:, None], 3, stride=1, padding=1)
        return pooled[:, 0]


class Contracts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bn,bm,bm->bn", x, x, x)


class Recurs(nn.Module):
    """Regular loops: by number or element, forward or backward, over lists, sums and slots."""

    def forward(self, x: Tensor) -> Tensor:
        states = [x[:, 0]]
        for i in range(1, x.shape[1]):
            states.append(torch.tanh(states[-1] + x[:, i]))
        written, m = torch.zeros_like(x), torch.zeros(())
        for t in range(x.size(1) - 1, -1, -1):
            m = m * 0.5 + torch.maximum(x[:, t], x[:, t - 1])
            written[:, t] = m
        total: Any = 0
        sums = []
        for element in x.unbind(1):
            total = total + element
            sums.append(total)
        pairs = []
        for t in range(x.shape[1] - 1):
            pair = x[..., t : t + 2]
            pairs.append(pair.sum(-1, keepdim=True))
        rest: Tensor = torch.cat(pairs, 1)
        return torch.stack(states, 1) + written + torch.stack(sums, -1) + rest.sum(1)[:, None]


class Alternates(nn.Module):
    """An irregular loop: its steps differ."""

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        for i in range(x.shape[1]):
            if i % 2:
                state = state + x[:, i]
        return state[:, None] + x


class Windowed(nn.Module):
    """An irregular loop: a step reads everything before it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[:, : i + 1].sum(1) for i in range(x.shape[1])], 1)


def convert(module: nn.Module, format_name: str, folder: Path) -> float:
    signature = ModelSignature((fp32("x", "n"),), (fp32("y", "n"),), 4, SIZES)
    model, row = subject(module.eval(), signature), find_format(format_name)
    path = folder / row.platform.default_filename
    row.export(model, path, ExportTarget())
    return worst(model, row.open_session(path))


@pytest.mark.parametrize("format_name", ["onnx", "pt2"])
@pytest.mark.parametrize("module", [CountsSteps(), Windows(), PoolsSteps(), Contracts()])
def test_the_artifact_takes_every_size(tmp_path: Path, module: nn.Module, format_name: str) -> None:
    assert convert(module, format_name, tmp_path) < 1e-5


@pytest.mark.parametrize(
    "format_name",
    ["pt2", *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE)],
)
def test_a_regular_loop_takes_every_number_of_steps(tmp_path: Path, format_name: str) -> None:
    assert convert(Recurs(), format_name, tmp_path) < 1e-5
    assert not [name for name in globals() if name.startswith("_open_loop")]


@pytest.mark.parametrize("module", [Alternates(), Windowed()])
@pytest.mark.parametrize("format_name", ["onnx", "pt2"])
def test_an_irregular_loop_along_an_open_axis_is_refused_with_its_line(
    tmp_path: Path, format_name: str, module: nn.Module
) -> None:
    with pytest.raises(Unsupported, match=r"loops along an axis of open length \(test_") as caught:
        convert(module, format_name, tmp_path)
    assert exit_code(caught.value) == 4
    assert "range" not in globals()
    assert "len" not in globals()


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = nn.LSTM(1, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.recurrent(x[..., None])[0][:, -1]
        return x * last.sum(-1, keepdim=True)


@pytest.mark.thorough
def test_the_last_of_any_number_of_steps_is_the_last(tmp_path: Path) -> None:
    convert(LastState(), "onnx", tmp_path)  # leaves nothing behind
    for format_name in ("pt2", "savedmodel", "tflite"):
        assert convert(LastState(), format_name, tmp_path) < 1e-6, format_name


class OneMinus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 - (x > 0).long())


def test_a_number_minus_integers_is_a_float_in_onnx(tmp_path: Path) -> None:
    assert convert(OneMinus(), "onnx", tmp_path) == 0


class DoubledFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * gradients[0]


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.size = len(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 3 * gradients[0]


class HasOwnGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = DoubledFunction.apply(x) + Tripled.apply(x)
        return result


def test_functions_with_their_own_gradients_are_in_an_archive(tmp_path: Path) -> None:
    assert convert(HasOwnGradients(), "torchscript", tmp_path) < 1e-6
    x = torch.ones(2, requires_grad=True)
    DoubledFunction.apply(x).sum().backward()
    assert x.grad is not None


class KeywordTriple(nn.Module):
    def forward(self, *, x: Tensor) -> Tensor:
        return x * 3


def test_rounding_is_measured_for_arguments_by_name_too() -> None:
    signature = ModelSignature((fp32("x", "n"),), (fp32("y", "n"),), 4, SIZES)
    model = subject(KeywordTriple(), signature)
    assert model.diagnostics is not None
    with inference_mode(model.model):
        answers = {
            label: make()({"x": torch.ones(2, 4).numpy()})["y"].dtype.name
            for label, make in model.diagnostics.rounded_otherwise()
        }
    assert answers == {"float64": "float64", "weights moved by one ulp": "float32"}
