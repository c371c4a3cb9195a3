"""A refused artifact's message names the operator at which it parts from the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir
import pytest
import torch
from click.testing import Result
from torch import Tensor, nn

from modelport.exporters.formats import onnx
from tests.thorough import sampled


class Encoder(nn.Module):
    """Layers of several kinds, and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return torch.softmax(self.head(hidden) * 3, -1)


def weight(model: onnx_ir.Model, name: str) -> None:
    value = model.graph.initializers[name]
    assert value.const_value is not None
    value.const_value = onnx_ir.tensor(value.const_value.numpy() * np.float32(1.1), name=name)


def operator(model: onnx_ir.Model, kind: str, other: str) -> None:
    for node in model.graph:
        if node.op_type == kind:
            node.op_type = other
            node.attributes.clear()


SPOILT: dict[str, tuple[Callable[[onnx_ir.Model], None], str]] = {
    "activation": (
        lambda model: operator(model, "Gelu", "Relu"),
        "they first differ at aten.gelu.default in module 'body.1' (GELU)",
    ),
    "weight": (
        lambda model: weight(model, "head.weight"),
        "they first differ at aten.linear.default in module 'head' (Linear)",
    ),
    "function": (
        lambda model: operator(model, "Mul", "Add"),
        "they first differ at aten.mul.Tensor, test_export_difference.py line",
    ),
    "first layer": (lambda model: weight(model, "body.0.bias"), "in module 'body.0' (Linear)"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("what", sampled(SPOILT, "activation", "weight"))
def test_the_operator_is_named_at_which_they_part(
    invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    spoil, said = SPOILT[what]
    export = onnx.export

    def spoilt(source: object, path: Path, target: object) -> None:
        export(source, path, target)  # type: ignore[arg-type]
        model = onnx_ir.load(path)
        spoil(model)
        onnx_ir.save(model, path)

    monkeypatch.setattr(onnx, "export", spoilt)
    torch.save(Encoder().state_dict(), tmp_path / "m.pt")
    model = "tests.exporters.test_export_difference:Encoder"
    done = invoke(tmp_path / "m.pt", "--input", "x:FP32[4]", model=model)
    assert (done.exit_code, said in done.stderr) == (3, True), done.stderr
    assert done.stderr.count("\n") == 1
