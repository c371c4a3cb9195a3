"""The ONNX exporter keeps names and dimensions, says nothing, and tells what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import modelport.exporters.formats.onnx as formats_onnx
from modelport.exporters.errors import ParityError
from modelport.exporters.formats import onnx_session
from modelport.exporters.formats.base import ExportTarget, ParitySession
from modelport.exporters.formats.registry import find_format
from modelport.exporters.loaded_model import Source
from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.proof import parity
from modelport.exporters.sources.pytorch import source
from modelport.gateway.cli.errors import exit_code
from modelport.gateway.errors import Unsupported
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec
from tests.sweep import operators, opinfo


def convert(
    module: Any, path: Path, opset: int = 20, signature: ModelSignature | None = None
) -> onnx_session.OnnxParitySession:
    formats_onnx.export(loaded(module, signature), path, ExportTarget(opset=opset))
    return onnx_session.open_session(path)


def loaded(module: Any, declared: ModelSignature | None = None) -> Source:
    if declared is None:
        spec = module.modelport_spec
        return source(module, spec, spec.signature(module, 4))
    return source(module, ModelSpec("m", lambda module, batch: declared), declared)


def prove(module: nn.Module, session: ParitySession, declared: ModelSignature) -> None:
    parity.check(loaded(module, declared), session, samples=20, seed=0, atol=1e-5, rtol=1e-5)


def dims(values: Any) -> dict[str, list[Any]]:
    return {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in values
    }


def test_the_fraud_model_keeps_names_and_symbolic_dimensions_and_says_nothing(
    fraud: nn.Module, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    session = convert(fraud, path)
    assert capfd.readouterr() == ("", "")
    model = onnx.load(path)
    onnx.checker.check_model(model)
    assert dims(model.graph.input) == {"tokens": ["batch", "sequence"], "seq_lens": ["batch"]}
    assert dims(model.graph.output) == {"probability": ["batch"]}
    assert [opset.version for opset in model.opset_import if not opset.domain] == [20]
    assert str(Path.cwd()).encode() not in path.read_bytes(), "a stack trace was shipped"
    report = parity.check(loaded(fraud), session, samples=100, seed=0, atol=5e-6, rtol=0)
    assert report.agreement == 1.0


@pytest.mark.thorough
def test_large_weights_lie_beside_the_model_in_the_same_folder(
    vit: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats_onnx, "EXTERNAL_DATA_BYTES", 1000)
    convert(vit, tmp_path / "vit.onnx", opset=18)
    assert {path.name for path in tmp_path.iterdir()} == {"vit.onnx", "vit.onnx.data"}
    moved = tmp_path.parent / f"{tmp_path.name}-moved"
    tmp_path.rename(moved)
    onnx_session.open_session(moved / "vit.onnx")


class UserModel(nn.Module):
    """A user's model over ``x`` ``[B, n]`` whose ``forward`` is given."""

    def __init__(self, body: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def signature(batch: int = 4, axis: Axis | None = None) -> ModelSignature:
    return ModelSignature(
        (TensorSpec("x", Datatype.FP32, ("n",)),),
        (TensorSpec("y", Datatype.FP32, ("n",)),),
        batch,
        {"n": axis or Axis("n", 1, 9)},
    )


@pytest.mark.parametrize(
    "body",
    [
        lambda x: torch.stack([x[row] for row in range(x.shape[0])]),
        lambda x: torch.stack([x[:, column] for column in range(x.shape[1])], dim=1),
    ],
    ids=["batch unrolled", "axis unrolled"],
)
def test_a_loop_along_an_open_axis_is_refused(
    tmp_path: Path, body: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with pytest.raises(Unsupported, match=r"loops along an axis of open length \(test_export_onnx"):
        convert(UserModel(body), tmp_path / "m.onnx", signature=signature())


@pytest.mark.parametrize(
    "body",
    [lambda x: x * int(x.shape[1]), lambda x: x.reshape(int(x.shape[0]), -1) + 1],
    ids=["axis as a number", "batch as a number"],
)
def test_a_dimension_that_export_bakes_in_is_caught_by_the_proof(
    tmp_path: Path, body: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    module = UserModel(body)
    session = convert(module, tmp_path / "m.onnx", signature=signature())
    with pytest.raises(ParityError, match=r"the artifact fails at .*a dimension is baked in"):
        prove(module, session, signature())


@pytest.mark.parametrize(
    "declared",
    [signature(batch=1), signature(batch=0), signature(axis=Axis("n", 5, 5))],
    ids=["a largest batch of one", "no batch dimension", "an axis of one size"],
)
def test_unusual_signatures_are_exported_and_hold(tmp_path: Path, declared: ModelSignature) -> None:
    module = UserModel(lambda x: x.cumsum(-1))
    session = convert(module, tmp_path / "m.onnx", signature=declared)
    prove(module, session, declared)


@pytest.mark.thorough
def test_a_scalar_is_at_a_place_without_coordinates() -> None:
    scalars = [x for x in opinfo.samples("argwhere", torch.float32) if not x.tensors[0].dim()]
    assert scalars
    assert operators.tried("argwhere", scalars, "onnx") == ("right", "")


@pytest.mark.parametrize("opset", [5, 17, 99])
def test_an_opset_without_an_exporter_is_unsupported(vit: nn.Module, opset: int) -> None:
    with pytest.raises(Unsupported, match=f"--opset {opset} is not supported; use 18 to "):
        formats_onnx.export(loaded(vit), Path("unused"), ExportTarget(opset=opset))


def test_a_model_that_cannot_be_traced_is_unsupported_in_one_line(tmp_path: Path) -> None:
    def branchy(x: torch.Tensor) -> torch.Tensor:
        return x if float(x.sum()) > 0 else -x

    with pytest.raises(Unsupported, match=r"torch.onnx cannot export this model") as caught:
        convert(UserModel(branchy), tmp_path / "m.onnx", signature=signature())
    assert exit_code(caught.value) == 4
    assert "\n" not in str(caught.value)


def test_a_format_without_an_exporter_names_those_that_work() -> None:
    with pytest.raises(
        Unsupported, match=r"--format 'coreml' is not supported; use onnx, .* or all"
    ):
        find_format("coreml")


@pytest.mark.thorough
def test_the_operator_set_may_be_the_newest_that_the_runtime_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = ModelSignature(
        (TensorSpec("x", Datatype.FP32, (4,)),), (TensorSpec("y", Datatype.FP32, (4,)),), 4
    )
    newest = formats_onnx.newest_opset()
    assert newest >= 24
    module, path = nn.Softmax(-1), tmp_path / "model.onnx"
    prove(module, convert(module, path, 24, declared), declared)
    assert [o.version for o in onnx.load(path).opset_import if not o.domain] == [24]
    with pytest.raises(Unsupported, match=f"use 18 to {newest}, the newest"):
        convert(module, path, newest + 1, declared)
    # no converter takes Gelu from 20 beyond 25
    if newest > 25:
        with pytest.raises(Unsupported, match=r"cannot convert .* and stays at"):
            convert(nn.GELU(), path, newest, declared)
