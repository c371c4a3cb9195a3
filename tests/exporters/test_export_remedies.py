"""The remedy that a refusal names leads on: what is tried in its place is exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from modelport.exporters import api
from modelport.gateway.errors import ModelportError

FACTORY = "tests.exporters.test_export_remedies:build"


class Refusable(nn.Module):
    """A layer, and a function of it that some formats refuse."""

    def __init__(self, body: Callable[[nn.Linear, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self._body = body

    def forward(self, x: Tensor) -> Any:
        return self._body(self.layer, x)


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.layer(batch["x"])


class TakesTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class TakesLongSeries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(4, 2, 5)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).mean(-1)


MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "bessel": lambda: Refusable(lambda layer, x: torch.special.bessel_j0(layer(x))),
    "double": lambda: Refusable(lambda layer, x: (layer(x).double() * 2.5).float()),
    "branch": lambda: Refusable(
        lambda layer, x: torch.cond(x.sum() > 0, lambda y: layer(y), lambda y: y.tanh(), (x,))
    ),
    "text": lambda: Refusable(lambda layer, x: {"y": layer(x), "label": "cat"}),
    "one row": lambda: Refusable(lambda layer, x: layer(x.reshape(4))),
    "dict": TakesDict,
    "tensors": TakesTensors,
    "long": TakesLongSeries,
}


class RemediedRefusal(NamedTuple):
    """A refusal, the words of its message that are the remedy, and the same as arguments.

    Attributes:
        max_batch_size: 0 for a model whose rows depend on each other.
    """

    module: str
    format: str
    message: str
    remedy: str
    arguments: Mapping[str, Any]
    inputs: str = "x:FP32[4]"
    max_batch_size: int = 8


REFUSALS = {
    "too short a length": RemediedRefusal(
        "long", "pt2", r"does not run on x \[2, 4, 1\]: .*nothing declares the lengths of 'n'",
        "such as --input 'x:FP32[4,n=LOW..HIGH]'", {"input": ["x:FP32[4,n=5..32]"]},
        "x:FP32[4,n]",
    ),
    "a dict of tensors": RemediedRefusal(
        "dict", "pt2", r"if 'batch', the only argument of forward\(\), is a dict",
        "let --model name a factory whose module takes each tensor",
        {"model_kwargs": {"name": "tensors"}},
    ),
    "another size than declared": RemediedRefusal(
        "tensors", "pt2", r"does not run on x \[2, 5\]",
        "declare what forward() accepts with --input",
        {"input": ["x:FP32[4]"]}, "x:FP32[5]",
    ),
    "one row alone": RemediedRefusal(
        "one row", "pt2", r"does not run on x \[2, 4\]: .*; it runs on one row alone",
        "--max-batch-size 0 --input 'x:FP32[1,4]'",
        {"max_batch_size": 0, "input": ["x:FP32[1,4]"]},
    ),
    "a text beside a tensor": RemediedRefusal(
        "text", "pt2", r"forward\(\) returns str as 'label'",
        "or choose those with names by --output-name", {"output_name": ["y"]},
    ),
    "no branches in TorchScript": RemediedRefusal(
        "branch", "torchscript", r"no branches and loops of torch \(cond\)",
        "use --format onnx, pt2 or savedmodel", {"format": "pt2"}, "x:FP32[2,4]", 0,
    ),
}  # fmt: skip
#: Those that need TensorFlow.
SLOW = {
    "no operator in TensorFlow or ONNX": RemediedRefusal(
        "bessel", "savedmodel", r"special_bessel_j0.* no equivalent in TensorFlow",
        "use --format torchscript or pt2", {"format": "pt2"},
    ),
    "float64 in TensorFlow Lite": RemediedRefusal(
        "double", "tflite", r"no built-in kernel for tf\.Mul of float64; compute in float32",
        "use --format savedmodel", {"format": "savedmodel"},
    ),
}  # fmt: skip


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]()


def check(case: RemediedRefusal, folder: Path) -> None:
    torch.save(build(case.module).state_dict(), folder / "m.pt")
    given: dict[str, Any] = {
        "model": FACTORY,
        "model_kwargs": {"name": case.module},
        "format": case.format,
        "input": [case.inputs],
        "max_batch_size": case.max_batch_size,
        "output": folder / "artifact",
        "samples": 16,
    }
    with pytest.raises(ModelportError, match=case.message) as refused:
        api.export(folder / "m.pt", **given)
    assert case.remedy in str(refused.value)
    assert api.export(folder / "m.pt", **given | case.arguments)


@pytest.mark.parametrize("name", REFUSALS)
def test_the_remedy_of_a_refusal_leads_on(name: str, tmp_path: Path) -> None:
    check(REFUSALS[name], tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SLOW)
def test_the_remedy_of_tensorflows_refusals_leads_on(name: str, tmp_path: Path) -> None:
    check(SLOW[name], tmp_path)
