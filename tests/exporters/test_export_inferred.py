"""A module that declares no signature gets one: from --input, its examples, or its layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import Tensor, nn

from exporters.declaration import parse_tensor
from exporters.errors import UsageError
from exporters.sources import SourceRequest, inferred
from gateway.repository import config
from gateway.types import Axis, Datatype, ModelSignature, TensorSpec


def infer(module: nn.Module, *inputs: str, names: tuple[str, ...] = ()) -> ModelSignature:
    request = SourceRequest(Path("x.pt"), "m", inputs=inputs, output_names=names)
    return inferred.spec(module, request, None).signature(module, 4)


class Tagger(nn.Module):
    """Two inputs, two outputs, one of them as long as the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.head(self.embedding(tokens)) * weight[:, None, None]
        return hidden, hidden.mean(dim=(1, 2))


class Calls(nn.Module):
    """A module whose ``forward(x)`` is one layer."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


def test_declared_inputs_give_names_axes_ranges_and_outputs_that_follow_them() -> None:
    found = infer(
        Tagger(), "tokens:INT64[sequence=2..9]=0..10", "weight:FP32[]", names=("tags", "score")
    )
    assert found.inputs == (
        TensorSpec("tokens", Datatype.INT64, ("sequence",), 0, 10),
        TensorSpec("weight", Datatype.FP32, (1,), reshape=()),
    )
    assert found.axes == {"sequence": Axis("sequence", 2, 9)}
    assert found.outputs == (
        TensorSpec("tags", Datatype.FP32, ("sequence", 3)),
        TensorSpec("score", Datatype.FP32, (1,), reshape=()),
    )


@pytest.mark.parametrize(
    ("module", "spec"),
    [
        (Calls(nn.Linear(5, 2)), TensorSpec("x", Datatype.FP32, (5,))),
        (Calls(nn.Embedding(7, 2)), TensorSpec("x", Datatype.INT64, ("sequence",), 0, 6)),
        (Calls(nn.Conv1d(3, 2, 3)), TensorSpec("x", Datatype.FP32, (3, "length"))),
        (Calls(nn.Conv2d(3, 2, 3)), TensorSpec("x", Datatype.FP32, (3, "height", "width"))),
    ],
    ids=["linear", "embedding", "conv1d", "conv2d"],
)
def test_the_first_layer_tells_what_goes_in(module: nn.Module, spec: TensorSpec) -> None:
    found = infer(module)
    assert found.inputs == (spec,)
    assert found.outputs[0].name == "output"


@pytest.mark.parametrize("attribute", inferred.EXAMPLE_ATTRIBUTES)
def test_example_inputs_on_the_module_are_used(attribute: str) -> None:
    module = Tagger()
    example: Any = {"weight": torch.ones(2), "tokens": torch.zeros(2, 4, dtype=torch.int64)}
    setattr(module, attribute, example)
    found = infer(module)
    assert [spec.name for spec in found.inputs] == ["tokens", "weight"], "forward's order"
    assert found.inputs[0] == TensorSpec("tokens", Datatype.INT64, (4,), 0, 10)
    assert [spec.name for spec in found.outputs] == ["output_0", "output_1"]


@pytest.mark.parametrize(
    "text",
    ["tokens", "tokens:INT64", "tokens:LONG[3]", "x:FP32[0]", "x:FP32[a-b]", "x:FP32[n=5..2]", ""],
)
def test_an_input_in_another_form_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"write NAME:DATATYPE\[DIMS\], such as"):
        parse_tensor(text)


def test_a_model_that_nothing_tells_about_is_told_what_to_add() -> None:
    with pytest.raises(UsageError, match=r"\(tokens, weight\) cannot be told .* --input 'tokens:"):
        infer(Tagger())


def test_a_wrong_number_of_output_names_is_refused() -> None:
    with pytest.raises(UsageError, match="--output-name is given 3 times, the model has 1 outputs"):
        infer(Calls(nn.Linear(5, 2)), names=("a", "b", "c"))


def test_an_output_without_a_batch_is_refused() -> None:
    class Total(Calls):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).sum()

    with pytest.raises(UsageError, match="its first dimension is not the batch"):
        infer(Total(nn.Linear(5, 2)))


def test_any_module_is_exported_from_the_command_line(
    invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_models.py").write_text(
        """
from torch import nn

class PlainNet(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
"""
    )
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    torch.save(net.state_dict(), tmp_path / "net.pt")
    monkeypatch.syspath_prepend(tmp_path)
    done = invoke(tmp_path / "net.pt", "--output-name", "scores", model="their_models:PlainNet")
    assert done.exit_code == 0, done.stderr
    text = (tmp_path / "repository" / "plain_net" / "config.pbtxt").read_text()
    signature = config.signature(config.parse(text))
    assert [spec.name for spec in (*signature.inputs, *signature.outputs)] == ["input", "scores"]
