"""Every datatype to every format: exported, or refused with a reason; never an unforeseen error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn

from modelport.exporters.cli.export import export as export_command
from modelport.exporters.requests.random_inputs import DRAWABLE
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.tensorflow_runtime import keras
from modelport.exporters.sources import SourceRequest, pytorch
from modelport.exporters.sources.torch_eager import DATATYPES
from modelport.gateway.repository import config
from modelport.gateway.types import Datatype, ModelSignature
from tests.thorough import sampled, thorough

Invoke = Callable[..., Result]
AOTI = pytest.param(
    "aoti",
    marks=pytest.mark.skipif(
        not os.environ.get("MODELPORT_SLOW_TESTS"), reason="a compilation takes half a minute"
    ),
)

#: What no protocol has.
UNSERVABLE = (torch.complex64, torch.complex128, torch.float8_e4m3fn)


class Every(nn.Module):
    """Inputs of every type that a module takes, outputs of every type that it gives."""

    def __init__(self, weights: str = "float32") -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).to(getattr(torch, weights))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        dtype = self.layer.weight.dtype
        hidden = self.layer(sum(x.to(dtype) for x in inputs))
        return tuple((hidden > 0).to(given) for given in DATATYPES)


class Gives(nn.Module):
    """A linear layer that gives any one type."""

    def __init__(self, given: str, weights: str = "float32") -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).to(getattr(torch, weights))
        self._given = getattr(torch, given)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x.to(self.layer.weight.dtype)).to(self._given)
        return result


class Inside(nn.Module):
    """Arithmetic in bfloat16, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (x.bfloat16() @ self.layer.weight.bfloat16()).float()


def export(invoke: Invoke, tmp_path: Path, factory: Any, *arguments: str, **kwargs: str) -> Result:
    torch.manual_seed(0)
    torch.save(factory(**kwargs).state_dict(), tmp_path / "module.pt")
    model = f"{__name__}:{factory.__name__}"
    given = ("--model-kwargs", json.dumps(kwargs), "--name", "module")
    return invoke(tmp_path / "module.pt", *given, *arguments, model=model)


def refused(done: Result) -> str:
    assert done.exit_code == 4, done.stderr
    (line,) = done.stderr.splitlines()
    assert "unexpected" not in line
    assert ";" in line, "no remedy"
    return line


def published(tmp_path: Path) -> ModelSignature:
    text = (tmp_path / "repository" / "module" / "config.pbtxt").read_text()
    return config.signature(config.parse(text))


@pytest.mark.parametrize("chosen", ["torchscript", thorough("onnx"), thorough("pt2"), AOTI])
def test_every_datatype_is_exported(chosen: str, invoke: Invoke, tmp_path: Path) -> None:
    taken = sorted(DRAWABLE - {Datatype.BYTES})
    inputs = [part for d in taken for part in ("--input", f"x_{d.lower()}:{d}[4]=0..1")]
    done = export(invoke, tmp_path, Every, "--format", chosen, *inputs)
    assert done.exit_code == 0, done.stderr
    found = published(tmp_path)
    assert [spec.datatype for spec in found.inputs] == taken
    assert [spec.datatype for spec in found.outputs] == list(DATATYPES.values())


@pytest.mark.parametrize("dtype", UNSERVABLE, ids=str)
def test_an_output_that_no_protocol_has_is_named(
    dtype: torch.dtype, invoke: Invoke, tmp_path: Path
) -> None:
    done = export(invoke, tmp_path, Gives, given=str(dtype).removeprefix("torch."))
    assert f"output 'output' is {dtype}, which no protocol supports; return" in refused(done)


@pytest.mark.parametrize("datatype", [Datatype.BF16, Datatype.BYTES])
def test_an_input_that_no_module_takes_is_named(
    datatype: Datatype, invoke: Invoke, tmp_path: Path
) -> None:
    text = f"x:{datatype}[4]"
    done = export(invoke, tmp_path, Gives, "--input", text, given="float32")
    assert f"input 'x' has datatype {datatype}, which cannot be exported" in refused(done)


@pytest.mark.parametrize("dtype", ["fp32", thorough("fp16"), thorough("bf16")])
@pytest.mark.parametrize("chosen", ["onnx", "torchscript", "pt2", "savedmodel", "tflite", AOTI])
def test_bfloat16_weights_and_outputs_travel_as_float32(
    chosen: str, dtype: str, invoke: Invoke, tmp_path: Path
) -> None:
    arguments = ("--format", chosen, "--dtype", dtype, "--max-relative-error", "0.1")
    done = export(invoke, tmp_path, Gives, *arguments, given="bfloat16", weights="bfloat16")
    if dtype == "bf16" and chosen in ("onnx", "tflite"):
        assert "cannot be converted to" in refused(done)
    else:
        assert done.exit_code == 0, done.stderr
        found = published(tmp_path)
        assert [spec.datatype for spec in (*found.inputs, *found.outputs)] == [Datatype.FP32] * 2


def test_bfloat16_weights_lose_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = Gives("float32", "bfloat16").state_dict()
    torch.save(state, tmp_path / "module.pt")
    kwargs = {"given": "float32", "weights": "bfloat16"}
    request = SourceRequest(tmp_path / "module.pt", f"{__name__}:Gives", kwargs)
    loaded = pytorch.load(request).model.state_dict()
    assert {value.dtype for value in loaded.values()} == {torch.float32}
    assert all(torch.equal(loaded[key], value.float()) for key, value in state.items())


def test_arithmetic_that_the_runtime_has_no_kernel_for_is_cast(
    invoke: Invoke, tmp_path: Path
) -> None:
    done = export(invoke, tmp_path, Inside)
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "repository" / "module").exists()


@pytest.mark.parametrize("chosen", sampled(("onnx", "savedmodel", "tflite"), "savedmodel"))
def test_a_keras_model_in_bfloat16_is_exported_with_float32_outside_or_refused(
    chosen: str, invoke: Invoke, tmp_path: Path
) -> None:
    given = keras.Input((4,), name="x", dtype="bfloat16")
    layer = keras.layers.Dense(3, name="y", dtype="bfloat16")
    with quiet():
        keras.Model(given, layer(given)).save(tmp_path / "module.keras")
    fixed = (str(tmp_path / "module.keras"), "--format", chosen, "--samples", "20")
    done = CliRunner().invoke(
        export_command, [*fixed, "--repository", str(tmp_path / "repository")]
    )
    if done.exit_code:
        refused(done)
        assert chosen != "savedmodel"
    else:
        found = published(tmp_path)
        assert [spec.datatype for spec in (*found.inputs, *found.outputs)] == [Datatype.FP32] * 2
