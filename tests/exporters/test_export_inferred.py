"""A module that declares no signature gets one: from --input, its examples, or its layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modelport.exporters.sources import SourceRequest, signature_inference
from modelport.exporters.sources.tensor_flags import DEFAULT_LONGEST, parse_tensors
from modelport.gateway.errors import Unsupported, UsageError
from modelport.gateway.repository import config
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec


def infer(module: nn.Module, *inputs: str, names: tuple[str, ...] = ()) -> ModelSignature:
    request = SourceRequest(Path("x.pt"), "m", inputs=inputs, output_names=names)
    return signature_inference.spec(module, request, None).signature(module, 4)


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask[..., None]


@pytest.mark.parametrize(
    ("module", "inputs", "dims", "minimum"),
    [
        (nn.Conv2d(3, 4, 5), ("x:FP32[3,-1,-1]",), [(3, "x_1", "x_2")], 5),
        (Masked(), ("x:FP32[-1,6]", "mask:BOOL[-1]"), [("axis_0", 6), ("axis_0",)], 1),
    ],
    ids=["two axes of a size at least", "one axis of two inputs"],
)
def test_open_dims_are_named_and_bounded_by_trial(
    module: nn.Module, inputs: tuple[str, ...], dims: list[object], minimum: int
) -> None:
    found = infer(module, *inputs)
    assert [spec.dims for spec in found.inputs] == dims
    assert {axis.minimum for axis in found.axes.values()} == {minimum}


def test_open_dims_at_which_no_size_runs_are_refused_with_a_size_to_declare() -> None:
    with pytest.raises(Unsupported, match=r"declare sizes that it runs at, such as --input 'x:FP"):
        infer(nn.Linear(7000, 2), "x:FP32[-1]")


class Tagger(nn.Module):
    """Two inputs, two outputs, one of them as long as the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.head(self.embedding(tokens)) * weight[:, None, None]
        return hidden, hidden.mean(dim=(1, 2))


class LayerStack(nn.Module):
    """A module whose ``forward(x)`` is one layer."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


class ByValues(nn.Module):
    """A result whose length depends on the values of the inputs, or whose width does."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


BY_VALUES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a boolean index": (lambda x: x[x > 0], "x:FP32[6]"),
    "rows": (lambda x: x[x.amax(-1) > 0.5], "x:FP32[n=1..9,4]"),
    "the longest length": (lambda x: x[: int((x > 0).sum()) + 1], "x:FP32[6]"),
    "different values": (lambda x: torch.unique(x.round()), "x:FP32[6]"),
    "positions": (lambda x: x.nonzero(), "x:INT64[3,2]=0..4"),
}


@pytest.mark.parametrize("name", BY_VALUES)
def test_a_length_that_depends_on_the_values_is_open(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    function, declared = BY_VALUES[name]
    request = SourceRequest(Path("x.pt"), "m", inputs=(declared,))
    spec = signature_inference.spec(ByValues(function), request, None)
    (found,) = spec.signature(ByValues(function), 0).outputs
    assert found.dims[0] == -1
    assert -1 not in found.dims[1:]
    monkeypatch.setattr(signature_inference, "WITHIN", ())  # the known-bad variant
    (naive,) = spec.signature(ByValues(function), 0).outputs
    assert naive.dims[0] != -1 or name == "rows"


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
        (LayerStack(nn.Linear(5, 2)), TensorSpec("x", Datatype.FP32, (5,))),
        (LayerStack(nn.Embedding(7, 2)), TensorSpec("x", Datatype.INT64, ("sequence",), 0, 6)),
        (LayerStack(nn.Conv1d(3, 2, 3)), TensorSpec("x", Datatype.FP32, (3, "length"))),
        (LayerStack(nn.Conv2d(3, 2, 3)), TensorSpec("x", Datatype.FP32, (3, "height", "width"))),
    ],
    ids=["linear", "embedding", "conv1d", "conv2d"],
)
def test_the_first_layer_tells_what_goes_in(module: nn.Module, spec: TensorSpec) -> None:
    found = infer(module)
    assert found.inputs == (spec,)
    assert found.outputs[0].name == "output"


@pytest.mark.parametrize("attribute", signature_inference.EXAMPLE_ATTRIBUTES)
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
        parse_tensors([text])


AXES = {"sequence": (1, 64), "height": (8, 8), "width": (2, 300)}


@st.composite
def _declared(draw: st.DrawFn) -> tuple[list[str], list[str], set[str], set[str]]:
    """Inputs and outputs of random axes; the axes that there are, and those with written bounds."""
    written, bounded = set(), set()
    texts = []
    for number in range(draw(st.integers(1, 6))):
        dims = []
        for axis in draw(st.lists(st.sampled_from(sorted(AXES)), max_size=3, unique=True)):
            low, high = AXES[axis]
            bounds = draw(st.booleans())
            written.add(axis)
            bounded |= {axis} if bounds else set()
            dims.append(f"{axis}={low}..{high}" if bounds else axis)
        values = draw(st.sampled_from(["", "=0..999", "=..7", "=0.."]))
        texts.append(f"t{number}:INT64[{','.join(dims)}]{values}")
    texts = draw(st.permutations(texts))
    split = draw(st.integers(0, len(texts)))
    return texts[:split], texts[split:], written, bounded


@given(_declared())
def test_bounds_of_an_axis_hold_wherever_they_are_written(
    declared: tuple[list[str], list[str], set[str], set[str]],
) -> None:
    inputs, outputs, written, bounded = declared
    taken, given_out, axes = parse_tensors(inputs, outputs)
    assert [spec.name for spec in (*taken, *given_out)] == [
        text.partition(":")[0] for text in (*inputs, *outputs)
    ]
    assert axes == {
        name: Axis(name, *(AXES[name] if name in bounded else (1, DEFAULT_LONGEST)))
        for name in written
    }


def test_a_range_of_values_does_not_forget_the_bounds_that_another_input_gave_its_axis() -> None:
    texts = ("ids:INT64[sequence=1..64]=0..999", "mask:INT64[sequence]=0..1")
    for order in (texts, texts[::-1]):
        assert parse_tensors(order)[2] == {"sequence": Axis("sequence", 1, 64)}


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (("a:FP32[n=1..64]", "b:FP32[m]", "c:FP32[n=1..32]"), ()),
        (("a:FP32[n=1..64]",), ("c:FP32[n=1..32]",)),
    ],
    ids=["two inputs", "an input and an output"],
)
def test_contradictory_bounds_are_an_error_that_names_both(
    inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as refused:
        parse_tensors(inputs, outputs)
    second = f"{'--output-tensor' if outputs else '--input'} 'c:FP32[n=1..32]'"
    assert f"--input 'a:FP32[n=1..64]' and {second} give axis 'n'" in str(refused.value)
    assert "different bounds, 1..64 and 1..32; write them once" in str(refused.value)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (("x:FP32[3]", "x:FP32[3]"), "--input declares 'x' twice"),
        (("x:FP32[n=1..4,n=1..5]",), "give axis 'n' different bounds"),
        (
            ("x:FP32[sequence]", "lengths:INT64[]=1..sequense"),
            "ends at axis 'sequense', which no tensor has; did you mean 'sequence'?",
        ),
        (("x:fp32[3]",), "'fp32' is not a datatype; did you mean 'FP32'?"),
        (("x:INT64[3]=9..3",), "the range 9..3 is empty"),
        (("x:FP32[n=4..3]",), "the bounds of axis 'n' are empty"),
        (("x:FP32[n=0..0]",), "the bounds of axis 'n' are empty"),
        (("x:UINT8[3]=-5..5",), "-5 is not a value of UINT8"),
        (("x:INT8[3]=0..128",), "128 is not a value of INT8"),
        (("x:INT64[3]=0.5..2",), "0.5 is not a value of INT64"),
        (("x:BOOL[3]=0..2",), "2 is not a value of BOOL"),
        (("x:FP32[3]=0..1e39",), "1e+39 is not a value of FP32"),
        (("x:FP64[3]=0..1e999",), "inf is not a value of FP64"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_named(inputs: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_tensors(inputs)
    assert said in str(refused.value)


def test_the_error_for_a_model_without_known_inputs_names_the_option_to_add() -> None:
    expected = r"\(tokens, weight\) cannot be inferred .* --input 'tokens:"
    with pytest.raises(UsageError, match=expected):
        infer(Tagger())


def test_a_wrong_number_of_output_names_is_refused() -> None:
    with pytest.raises(UsageError, match="--output-name is given 3 times, the model has 1 outputs"):
        infer(LayerStack(nn.Linear(5, 2)), names=("a", "b", "c"))


@pytest.mark.parametrize("names", [("a", "a"), ("a", "")])
def test_names_of_outputs_are_distinct(names: tuple[str, ...]) -> None:
    class Twice(LayerStack):
        def forward(self, x: Tensor) -> Any:
            return self.body(x), x

    with pytest.raises(UsageError, match=f"--output-name '{names[1]}' is empty or given twice"):
        infer(Twice(nn.Linear(5, 2)), "x:FP32[5]", names=names)


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (torch.tensor(1.0), "holds no batch for 'x'"),
        (torch.zeros(0, 5), "holds no batch for 'x'"),
        ("text", "holds no batch for 'x'"),
    ],
    ids=["a number", "no row", "text"],
)
def test_an_example_without_a_batch_is_refused(example: Any, said: str) -> None:
    module = LayerStack(nn.Linear(5, 2))
    module.example_inputs = example
    with pytest.raises(UsageError, match=said):
        infer(module)


def test_a_property_that_fails_is_no_example() -> None:
    class Failing(LayerStack):
        @property
        def dummy_inputs(self) -> Any:
            raise RuntimeError("no data")

    assert infer(Failing(nn.Linear(5, 2))).inputs == (TensorSpec("x", Datatype.FP32, (5,)),)


def test_an_output_without_a_batch_is_refused() -> None:
    class BatchTotal(LayerStack):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).sum()

    with pytest.raises(UsageError, match="its first dimension is not the batch"):
        infer(BatchTotal(nn.Linear(5, 2)))


@pytest.mark.parametrize("found", ["absent", r"\[2, 5\]"])
def test_an_output_that_only_some_sizes_have_is_named(found: str) -> None:
    class Changing(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            if x.shape[1] == 1:
                return {"whole": x, "first": x}
            return {"whole": x} if found == "absent" else {"whole": x, "first": x[:, 0]}

    expected = rf"output 'first' is \[2, 1, 5\] at the shortest 'n' and {found} at the longest"
    with pytest.raises(UsageError, match=expected):
        infer(Changing(), "x:FP32[n=1..9,5]")


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
