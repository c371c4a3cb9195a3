"""Code that turns a size into a number: the artifact takes every size, or the refusal names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._device import _device_constructors

from modelport.exporters.formats import loop_rewriting, open_sizes
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import find_format
from modelport.exporters.sources.tensor_flags import parse_tensors
from modelport.exporters.sources.torch_eager import inference_mode
from modelport.gateway.cli.errors import exit_code
from modelport.gateway.errors import Unsupported
from modelport.gateway.types import Axis, ModelSignature
from tests.torch_subjects import fp32, grid, subject, worst

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
        whole = functional.max_pool1d(x[:, None], x.shape[1]) + x[:, None]
        whole = whole * functional.avg_pool1d(x[:, None], x.size(1))
        return pooled[:, 0] + whole[:, 0] + functional.adaptive_max_pool1d(x[:, None], 1)[:, 0]


class Contracts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bn,bm,bm->bn", x, x, x)


class MeasuresItself(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        x = x * torch.linspace(-1, 3, size)
        return x / torch.tensor([[size / 2], [1.0]]).sum() + torch.tensor(size) * torch.tensor(0.5)


class Density(nn.Module):
    """Distributions, which check their arguments' values."""

    def forward(self, x: Tensor) -> Tensor:
        normal = torch.distributions.Normal(x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1)
        mixed = torch.distributions.Categorical(logits=x)
        found: Tensor = normal.log_prob(x) + mixed.entropy()[:, None] + normal.cdf(x)
        return found


class RecursAfterPooling(nn.Module):
    """A recurrent layer over as many steps as an expression of an open size says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.GRU(1, 2, 2, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        steps = functional.max_pool1d(x[:, None], 2).permute(2, 0, 1)
        last: Tensor = self.layers(steps)[0][-1]
        return x * last.sum(-1, keepdim=True)


class Transforms(nn.Module):
    """A Fourier transform over a number of points that is open, and its inverse."""

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(x, norm="ortho")
        both = torch.fft.ifft(torch.fft.fft(x) * 2).real + found.abs().sum(-1, keepdim=True)
        return both + torch.fft.irfft(found, n=x.shape[1], norm="ortho")


class ModulatesWeights(nn.Module):
    """Convolutions with weights of each row's own, each row being a group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(1, 3, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        rows, size = x.shape
        weight = self.weight * x.mean(1).view(rows, 1, 1, 1)
        channels = torch.cat([x, x.abs()], 1).view(1, rows * 2, size)
        wide = functional.conv1d(channels, weight.view(-1, 2, 3), padding=1, groups=rows)
        back = weight.view(-1, 2, 3)
        long = functional.conv_transpose1d(
            wide, back, None, 2, padding=1, output_padding=1, groups=rows
        )
        return long.view(rows, 2, -1)[:, 1, ::2]


class ConvolvesPadded(nn.Module):
    """A convolution of what is padded to an open size, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv1d(3, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = functional.avg_pool1d(x[:, None], 2).expand(-1, 3, -1)
        gap = x.shape[1] - pooled.shape[2]
        padded = functional.pad(pooled, [gap // 2, gap - gap // 2])
        found: Tensor = self.convolution(padded)[:, 0]
        return found


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


class BeginsApart(nn.Module):
    """A regular loop whose first step differs from the others."""

    def forward(self, x: Tensor) -> Tensor:
        states = []
        for t in range(x.shape[1]):
            if t == 0:
                state = x[:, 0] * 2
                states.append(state)
                continue
            state = torch.sigmoid(state) * x[:, t] + state
            states.append(state)
        return torch.stack(states, 1)


class Alternates(nn.Module):
    """Loops whose steps differ, over numbers, elements and pairs, and a list of results."""

    def forward(self, x: Tensor) -> Tensor:
        state, total, found = x[:, 0], torch.zeros_like(x), []
        for i in range(x.shape[1]):
            if i % 2:
                state = state + x[:, i]
            else:
                half = state * 0.5
                state = half if i > 2 else state
        for t, (a, b) in enumerate(zip(x.unbind(1), torch.unbind(x * 2, dim=1), strict=True)):
            total[:, t], state = a + state, state * 0.3 + b
        for t in range(x.shape[1] - 1, -1, -1):
            if t > 1:
                state = state * 0.9
            found.append(state + x[:, t])
        squares = torch.stack([x[:, i] * i for i in range(x.size(1))], 1)
        return state[:, None] + total + squares + torch.stack(found[::-1], 1)


class GoesBack(nn.Module):
    """Decodes by Viterbi's algorithm, then goes through lists in both directions."""

    def forward(self, x: Tensor) -> Tensor:
        score, history, pairs = x[:, 0], [], []
        for t in range(1, x.shape[1]):
            score, back = torch.stack([score, x[:, t]], 1).max(1)
            history.append(back)
            pairs.append((score, back * 2))
        place = score.round().long()
        tags = [place]
        for back in reversed(history):
            place = place * 2 + back
            tags.append(place)
        tags.reverse()
        late: list[Tensor] = []
        for t in range(x.shape[1] - 2, -1, -1):
            a, b = pairs[t]
            score = score * 0.5 + a - b
            late.insert(0, score)
        for a, row in zip(late, x.transpose(0, 1)[1:], strict=True):
            score = score * 0.5 + a * row
        return torch.stack(tags, 1) + score[:, None]


class Stops(nn.Module):
    """An irregular loop: it may end early."""

    def forward(self, x: Tensor) -> Tensor:
        for i in range(x.shape[1]):
            if i > 100:
                break
            x = x + 1
        return x


class Windowed(nn.Module):
    """An irregular loop: a step reads everything before it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[:, : i + 1].sum(1) for i in range(x.shape[1])], 1)


class AttendsToThePast(nn.Module):
    """One step of attention over the states of earlier steps, of which the first step has none."""

    def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        states = torch.cat([past, x[:, None]], 1)
        weights = torch.softmax(states @ x[:, :, None], 1)
        return (weights * states).sum(1), states.flip(1).cumsum(1)[:, :1]


def convert(module: nn.Module, format_name: str, folder: Path) -> float:
    signature = ModelSignature((fp32("x", "n"),), (fp32("y", "n"),), 4, SIZES)
    model, row = subject(module.eval(), signature), find_format(format_name)
    path = folder / row.platform.default_filename
    row.export(model, path, ExportTarget())
    return worst(model, row.open_session(path))


@pytest.mark.parametrize("format_name", ["onnx", "pt2"])
@pytest.mark.parametrize(
    "module", [CountsSteps(), Windows(), PoolsSteps(), Contracts(), MeasuresItself(), Density()]
)
def test_the_artifact_takes_every_size(tmp_path: Path, module: nn.Module, format_name: str) -> None:
    assert convert(module, format_name, tmp_path) < 1e-5


@pytest.mark.parametrize(
    "format_name",
    [
        *("onnx", "pt2", "torchscript"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("savedmodel", "tflite")),
    ],
)
def test_an_axis_may_be_empty(tmp_path: Path, format_name: str) -> None:
    inputs, _, axes = parse_tensors(["x:FP32[3]", "past:FP32[past=0..5,3]"])
    outputs = (fp32("answer", 3), fp32("newest", 1, 3))
    model = subject(AttendsToThePast().eval(), ModelSignature(tuple(inputs), outputs, 4, axes))
    assert any(each["past"].shape[1] == 0 for each in grid(model.signature))
    row = find_format(format_name)
    path = tmp_path / row.platform.default_filename
    row.export(model, path, ExportTarget())
    assert worst(model, row.open_session(path)) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("format_name", ["pt2", *MORE])
@pytest.mark.parametrize("module", [Recurs(), Alternates(), GoesBack()])
def test_a_regular_loop_takes_every_number_of_steps(
    tmp_path: Path, format_name: str, module: nn.Module
) -> None:
    assert convert(module, format_name, tmp_path) < 1e-5
    assert not [name for name in globals() if name.startswith("_open_loop")]


@pytest.mark.parametrize(
    "format_name", [pytest.param(name, marks=pytest.mark.thorough) for name in ("pt2", *MORE)]
)
def test_a_loop_whose_first_steps_differ_takes_every_number_of_steps(
    tmp_path: Path, format_name: str
) -> None:
    assert convert(BeginsApart(), format_name, tmp_path) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("format_name", MORE)
@pytest.mark.parametrize(
    "module", [RecursAfterPooling(), Transforms(), ModulatesWeights(), ConvolvesPadded()]
)
def test_steps_of_any_number_recur_and_are_transformed(
    tmp_path: Path, module: nn.Module, format_name: str
) -> None:
    if format_name == "onnx" and isinstance(module, Transforms):
        pytest.skip("ONNX Runtime's DFT takes no open size of an inverse")
    assert convert(module, format_name, tmp_path) < 1e-5


LOOP = """
def loop(values):
    total, states, size = 0, [], len(values)
    for t in range({bounds}):
        first = bool({test})
        if {test}:
            total = total + values[t]
        else:
            total = 2 * total - values[t] * (1 if {test} else t)
        states.append(total + first)
    return total, states
"""
PLACES = {"size": "012", "1, size": "123", "size - 1, -1, -1": ("size - 1",)}
TESTS = [
    (bounds, form.format(comparison))
    for bounds, places in PLACES.items()
    for place in places
    for operator in ("==", "!=", "<", "<=", ">", ">=")
    for comparison in (f"t {operator} {place}", f"{place} {operator} t")
    for form in ("{}", "not {}", "size > 0 and {}", "size < 0 or not {}", "{} or t and t != 2")
    if "and t" not in form or "-1" not in bounds
]


def variants(cases: list[tuple[str, str]], folder: Path) -> list[tuple[Any, Any]]:
    """Each loop as it is, and its variant, whose steps Python counts."""
    found = []
    for number, (bounds, test) in enumerate(cases):
        path = folder / f"loop_{number}.py"
        path.write_text(LOOP.format(bounds=bounds, test=test))
        names: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec"), names)
        names["_open_loop_is_open"] = lambda bounds: True
        names["_open_loop_at"] = lambda x, place: x[place]
        names["_open_loop_run"] = counted
        names["_open_loop_first"] = lambda count, bounds: range(*bounds)[:count]
        names["_open_loop_Steps"] = lambda first, rest, in_front: first + rest
        names["_open_loop_select"] = lambda test, x, y: x if test else y
        found.append((names["loop"], loop_rewriting.rewritten(names["loop"])))
    return found


def counted(step: Any, bounds: Any, state: list[Any], done: int) -> tuple[Any, Any]:
    results: list[Any] = []
    for place in range(*bounds)[done:]:
        state, (result,) = step(place, *state)
        results.append(result)
    return state, [results]


@pytest.mark.thorough
def test_a_loop_may_tell_its_first_steps_by_any_comparison(tmp_path: Path) -> None:
    for (loop, variant), case in zip(variants(TESTS, tmp_path), TESTS, strict=True):
        for size in range(4, 7):
            values = [3 * n % 7 - 2 for n in range(size)]
            assert variant(values) == loop(values), case


@pytest.mark.parametrize("module", [Stops(), Windowed()])
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


class TimesVectors(nn.Module):
    """Products of matrices, as they are and transposed, with vectors on either side."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.arange(3.0) - 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.stack([x, x * x, x + 1], 1)
        tall = torch.stack([x, x.abs(), x - 2], -1)
        products = [tall @ self.vector, wide.mT @ self.vector, self.vector @ wide]
        products += [
            self.vector @ tall.mT,
            x * torch.mv(torch.outer(self.vector, self.vector).t(), self.vector).sum(),
        ]
        deep = wide[:, None].expand(-1, 2, -1, -1).mT @ self.vector
        return sum(products, deep.sum(1))


def test_products_of_a_matrix_and_a_vector_are_right_in_onnx(tmp_path: Path) -> None:
    assert convert(TimesVectors(), "onnx", tmp_path) < 1e-5


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
    assert answers == {
        "float64": "float64",
        "weights moved by one ulp": "float32",
        "products moved by one ulp": "float32",
    }


def test_torch_still_knows_its_own_functions_after_an_export() -> None:
    _device_constructors.cache_clear()  # as in a process that has used no other device
    with open_sizes.kept_by(CountsSteps()), torch.device("cpu"):
        torch.zeros(1)
    with torch.device("meta"):
        made = torch.tensor([]), torch.linspace(0, 1, 2)
    assert {each.device.type for each in made} == {"meta"}
