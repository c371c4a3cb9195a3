"""A model that PyTorch cannot export: the part, its line of code, the reason and the remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows

from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import FORMATS
from modelport.exporters.sources import torch_errors
from modelport.gateway.errors import Unsupported
from modelport.gateway.types import Axis, ModelSignature
from tests.torch_subjects import fp32, subject

FILE = Path(__file__).name
#: Words of PyTorch's advice to its own developers.
INTERNAL = re.compile(r"TORCH|guard|Size-like|u0|https?:|User Stack|aten::|\.cpp|[\n]")
ROWS = ModelSignature((fp32("x", 4),), (fp32("y", 4),), 4)
SERIES = ModelSignature((fp32("x", "n", 4),), (fp32("y", 4),), 4, {"n": Axis("n", 1, 9)})


class TwoWays(nn.Module):
    """Takes one of two ways."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line of TwoWays
            return x + 1
        return x - 1


class Selects(nn.Module):
    """Keeps as many values as are positive."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = x.flatten().masked_select(x.flatten() > 0).tolist()  # the line of Selects
        return x + len(chosen)


class Fixed(nn.Module):
    """Takes five steps."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], 5, 4).sum(1)  # the line of Fixed


class Bessel(nn.Module):
    """Has an operator that few formats have."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)  # the line of Bessel


class Mapped(nn.Module):
    """Has a higher-order operator that few formats have."""

    def forward(self, x: Tensor) -> Any:
        return map_rows(lambda row: row.cumsum(0) * 2, x)  # the line of Mapped


class NestedPart(nn.Module):
    """A part within a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), part)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.encoder(x)
        return result


def line_of(part: type[nn.Module]) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"line of {part.__name__}"))


def refused(part: nn.Module, row: str, signature: ModelSignature, path: Path) -> str:
    with pytest.raises(Unsupported) as caught:
        FORMATS.builtin[row].export(
            subject(NestedPart(part), signature), path / "model", ExportTarget()
        )
    said = str(caught.value)
    assert not INTERNAL.search(said), said
    assert len(said) < 500, said
    return said


@pytest.mark.parametrize(
    ("part", "row", "tool", "reason"),
    [
        *(
            (
                part,
                row,
                tool,
                "its result depends on a value that is known only when the model runs",
            )
            for part in (TwoWays, Selects)
            for row, tool in (("onnx", "torch.onnx"), ("pt2", "torch.export"))
        ),
        (TwoWays, "savedmodel", "torch.export", "its result depends on a value"),
        (
            Bessel,
            "onnx",
            "torch.onnx",
            "operator 'prims.bessel_j0' does not exist in ONNX",
        ),
        (Mapped, "onnx", "torch.onnx", "operator 'map_impl' does not exist in ONNX"),
    ],
)
def test_the_part_its_line_and_the_reason_are_named(
    tmp_path: Path, part: type[nn.Module], row: str, tool: str, reason: str
) -> None:
    said = refused(part(), row, ROWS, tmp_path)
    place = f"'encoder.1' ({part.__name__}), {FILE} line {line_of(part)}"
    assert said.startswith(f"{tool} cannot export this model: {place}")
    assert f": {reason}" in said


def test_sizes_that_do_not_pass_are_named_with_their_axis(tmp_path: Path) -> None:
    said = refused(Fixed(), "pt2", SERIES, tmp_path)
    assert said == (
        "torch.export cannot export this model: it accepts only some of the sizes of n; "
        "take sizes from x.shape in forward(), or declare those that it accepts with --input and "
        "--max-batch-size"
    )


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("too deep. For more information, run with TORCH_LOGS='+dynamic'", "too deep"),
        ("no kernel\nException raised from f at x.cpp:1\nframe #0: main", "no kernel"),
        ("", "RuntimeError"),
        ("long " * 100, f"{('long ' * 40).strip()} ..."),
    ],
    ids=["advice", "a stack", "nothing", "pages"],
)
def test_a_message_ends_where_the_internals_begin(message: str, reason: str) -> None:
    with pytest.raises(Unsupported) as caught, torch_errors.translated("torch.jit.trace"):
        raise RuntimeError(message)
    assert str(caught.value) == (
        f"torch.jit.trace cannot export this model: {reason}; rewrite that part, or use another "
        "--format"
    )


def test_errors_of_files_and_of_the_project_are_passed_on() -> None:
    for error in (OSError("disk"), Unsupported("no such format")):
        with pytest.raises(type(error), match=str(error)), torch_errors.translated("torch.onnx"):
            raise error
