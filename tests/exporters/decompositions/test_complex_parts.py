"""Complex tensors become pairs of real ones, in TFLite whole and in ONNX where it lacks them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modelport.exporters.decompositions.complex_parts import with_parts, without_pairs
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import find_format
from modelport.gateway.types import ModelSignature
from tests.torch_subjects import fp32, subject, worst

#: torch.export's own.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SIZE = 12


def assigned(z: Tensor) -> Tensor:
    """Elements put into a complex tensor in every way that Python writes."""
    y, rows = torch.zeros_like(z), torch.tensor([2, 0])
    y[:, :, :3] = z[:, :, 3:]
    y[:, 1] = 2j * z[:, 0]
    y[:, :, -1:] = z.real[:, :, :1]
    y[:, rows] = z[:, :2]
    y.diagonal(dim1=1, dim2=2).copy_(z[:, :, 0])
    y = y.index_add(1, rows, z[:, :2]).index_copy(2, rows, z[..., :2])
    y = y.masked_fill(z.real > 1, 1j)
    places = torch.zeros(y.shape, dtype=torch.int64)
    return y.scatter_add(1, places, z).scatter(1, places[:, :1], z[:, 1:2])


#: Of one complex tensor ``z``, and of the real one ``x`` that has its values.
COMPUTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sums": lambda z, x: z + x[..., :6] - z.conj() * 2 + 3j - z.sum(-1, True) + z.mean(1, True),
    "products": lambda z, x: z * z[..., :1] * 1j * 2 * x[..., :6] * z**2,
    "quotients": lambda z, x: z / (z + 3) + 1 / (z + 2) + z.reciprocal() / 2,
    "matrices": lambda z, x: z @ z.mT + torch.einsum("bij,bkj->bik", z, z.conj()),
    "size and angle": lambda z, x: torch.polar(z.abs(), z.angle()) * z.exp(),
    "moved": lambda z, x: z.unsqueeze(1).expand(-1, 2, -1, -1).flatten(1, 2).mT.squeeze().flip(1),
    "taken apart": lambda z, x: torch.stack([each * 2 for each in z.unbind(-1)[:2]], 1),
    "split": lambda z, x: torch.cat(z.split(3, -1)[::-1], 1).roll(1, 1).repeat(1, 2, 1),
    "chosen": lambda z, x: torch.where(x[..., :6] > 0, z, z.conj())[:, [2, 0, 0]][..., 1],
    "zeros": lambda z, x: torch.zeros_like(z).index_select(1, torch.tensor([1, 0])) + z[:, :2],
    "parts": lambda z, x: torch.complex(z.imag, z.real) + torch.view_as_complex(
        torch.view_as_real(z) + 1),
    "of real numbers": lambda z, x: z.real.to(torch.complex64) + z,
    "created": lambda z, x: torch.zeros(3, 6, dtype=torch.complex64) + torch.full((6,), 2j) * z,
    "assigned": lambda z, x: assigned(z),
    "padded": lambda z, x: nn.functional.pad(z, (1, 2)),
    "transforms": lambda z, x: torch.fft.ifft2(torch.fft.fft(z, dim=1), norm="ortho"),
    "a real transform": lambda z, x: torch.fft.rfft(x)[..., 1:5] + torch.fft.rfft(x, 9)[..., :4],
    "over two axes": lambda z, x: torch.fft.rfft2(x, norm="ortho"),
    "and back": lambda z, x: torch.fft.irfft(torch.fft.rfft(x, 2 * SIZE) * 2j, 2 * SIZE),
    "of an odd length": lambda z, x: torch.fft.irfft2(torch.fft.rfft2(x[..., :7]), (3, 7)),
    "a spectrum of frames": lambda z, x: torch.stft(
        x.flatten(1), 8, 4, window=torch.hann_window(8), return_complex=True).abs(),
}  # fmt: skip


class Computed(nn.Module):
    """A complex tensor of a real one, and the parts of what is computed of it."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("turned", torch.polar(torch.ones(6), torch.arange(6.0)))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], SIZE // 2, 2)) * self.turned
        y = self.function(z, x)
        return torch.view_as_real(y) if y.is_complex() else y


@pytest.mark.parametrize("name", COMPUTED)
def test_no_complex_tensor_is_left_and_the_numbers_are_the_same(name: str) -> None:
    module, x = Computed(COMPUTED[name]), torch.randn(2, 3, SIZE)
    shapes = ({0: torch.export.Dim("batch", min=1, max=8)},)
    traced = torch.export.export(module, (x,), dynamic_shapes=shapes)
    program = traced.run_decompositions(with_parts(torch.export.default_decompositions()))
    without_pairs(program.graph)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.target is torch.ops.aten._fft_r2c.default:  # of 8 points, which TFLite has
            continue
        if node.target is torch.ops.aten.view.default:  # strides are PyTorch's alone
            node.target = torch.ops.aten.reshape.default
        is_tensor = isinstance(value, Tensor) and node.op == "call_function"
        assert not (is_tensor and value.is_complex()), node
    program.graph_module.recompile()
    x = torch.randn(3, 3, SIZE)
    torch.testing.assert_close(program.module()(x), module(x), rtol=1e-4, atol=1e-5)


class Rotated(nn.Module):
    """Rotary positions as LLaMA's own code has them, and a mixture over frequencies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Linear(8, 8)
        self.register_buffer("frequencies", 1 / 100 ** (torch.arange(0, 8, 2) / 8))

    def forward(self, x: Tensor) -> Tensor:
        turns = torch.outer(torch.arange(x.shape[1]).float(), self.frequencies)
        turned = torch.polar(torch.ones_like(turns), turns)[None]
        z = torch.view_as_complex(self.query(x).reshape(*x.shape[:2], -1, 2)) * turned
        y = torch.view_as_real(z).flatten(2)
        return torch.fft.fft(torch.fft.fft(y, dim=-1)[..., 1:7], dim=-1).real


class Enhanced(nn.Module):
    """A sound whose loud frequencies are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(20))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x, 20, 10, window=self.window, return_complex=True)
        kept = spectrum * spectrum.abs().tanh()
        return torch.istft(kept, 20, 10, window=self.window)


@pytest.mark.parametrize(
    "format_name", ["onnx", pytest.param("savedmodel", marks=pytest.mark.thorough)]
)
def test_a_sound_is_taken_apart_and_put_together(tmp_path: Path, format_name: str) -> None:
    signature = ModelSignature((fp32("x", 100),), (fp32("y", 100),), 4)
    model, row = subject(Enhanced().eval(), signature), find_format(format_name)
    path = tmp_path / row.platform.default_filename
    row.export(model, path, ExportTarget())
    assert worst(model, row.open_session(path)) < 1e-4


@pytest.mark.parametrize(
    "format_name", ["onnx", pytest.param("tflite", marks=pytest.mark.thorough)]
)
def test_rotary_positions_and_transforms_are_exported(tmp_path: Path, format_name: str) -> None:
    signature = ModelSignature((fp32("x", "steps", 8),), (fp32("y", "steps", 6),), 4)
    model, row = subject(Rotated().eval(), signature), find_format(format_name)
    path = tmp_path / row.platform.default_filename
    row.export(model, path, ExportTarget())
    assert worst(model, row.open_session(path)) < 1e-4
