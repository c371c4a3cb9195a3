"""Below fp32 an artifact is held to its decisions, on held-out data where there is any."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import Result
from torch import nn

from modelport.exporters.errors import ParityError
from modelport.exporters.loaded_model import Framework, Source
from modelport.exporters.model_spec import Decision, ModelSpec
from modelport.exporters.optimization import quantization
from modelport.exporters.proof import evaluation
from modelport.exporters.proof.evaluation import HeldOut
from modelport.exporters.sources.torch_eager import inference_mode
from modelport.exporters.tolerance import Bounds
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec
from tests.commands import failed
from tests.pickle_bomb import PickleBomb
from tests.thorough import thorough

Invoke = Callable[..., Result]


def certificate(tmp_path: Path, name: str = "fraud", version: int = 1) -> dict[str, Any]:
    path = tmp_path / "repository" / name / str(version) / "certificate.json"
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def spoiling(change: Callable[[Any], Any]) -> Callable[[Path, Path, bool, bool], None]:
    """A quantisation that changes every int8 matrix as well."""
    honest = quantization.to_dynamic_int8

    def quantized(draft: Path, path: Path, per_channel: bool, external_data: bool) -> None:
        honest(draft, path, per_channel, external_data)
        model = onnx.load(path)
        for tensor in model.graph.initializer:
            if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) == 2:
                array = np.ascontiguousarray(change(onnx.numpy_helper.to_array(tensor)))
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        onnx.save(model, path)

    return quantized


#: Rows of the held-out data, and how many are drawn to choose them from.
ROWS, POOL = 60, 4000

Rows = tuple[Any, Any]


@pytest.fixture
def pool() -> Rows:
    rng = np.random.default_rng(5)
    return rng.integers(0, 32, (POOL, 12)), rng.integers(1, 13, POOL)


def log_odds(fraud: nn.Module, rows: Rows) -> Any:
    with inference_mode(fraud):
        return fraud.logits(*map(torch.from_numpy, rows)).numpy()  # type: ignore[operator]


@pytest.fixture
def fraud(fraud: nn.Module, pool: Rows) -> nn.Module:
    """The tiny fraud model, its log-odds moved and spread: half of all rows on either side of 0."""
    found = log_odds(fraud, pool)
    head = fraud.head
    with torch.no_grad():
        head.bias -= float(np.median(found))  # type: ignore[operator,union-attr]
        for parameter in head.parameters():  # type: ignore[union-attr]
            parameter *= 4 / float(found.std())
    return fraud


@pytest.fixture
def held_out(fraud: nn.Module, pool: Rows, tmp_path: Path) -> Path:
    """Inputs of the tiny fraud model that it is surest of, and labels that it gets right.

    No rounding of any processor changes what it says of them: a row nearest to the threshold has
    log-odds of 7, which int8 moves by 0.3 at most.
    """
    order = np.argsort(log_odds(fraud, pool))
    chosen = np.concatenate([order[: ROWS // 2], order[-ROWS // 2 :]])
    tokens, seq_lens = (column[chosen] for column in pool)
    labels = np.arange(ROWS) >= ROWS // 2
    path = tmp_path / "held-out.npz"
    np.savez(path, tokens=tokens, seq_lens=seq_lens, labels=labels)
    return path


def test_held_out_rows_are_far_from_the_threshold(fraud: nn.Module, held_out: Path) -> None:
    with np.load(held_out) as rows:
        odds = log_odds(fraud, (rows["tokens"], rows["seq_lens"]))
        assert np.array_equal(odds > 0, rows["labels"])
    assert np.abs(odds).min() > 5


@pytest.mark.parametrize(
    "arguments",
    [thorough(("--dtype", "fp16")), thorough(("--quantize", "int8"))],
)
def test_a_lower_precision_is_published_with_its_error_size_and_what_it_kept(
    invoke: Invoke, fraud_checkpoint: Path, held_out: Path, tmp_path: Path, arguments: Any
) -> None:
    done = invoke(fraud_checkpoint, *arguments, "--data", str(held_out), "--min-agreement", "0.9")
    assert done.exit_code == 0, done.stderr
    assert "held out   AUC" in done.stdout
    content = certificate(tmp_path)
    found, parity = content["evaluation"], content["parity"]
    assert found["rows"] == ROWS
    assert found["metric"] == "AUC"
    assert found["reference"] == found["artifact"] == 1.0
    assert parity["bounds"]["agreement"] == 0.9
    assert 1e-6 < parity["outputs"]["probability"]["relative_error"] < 0.5
    assert content["artifact"]["size_bytes"] > 1000
    assert arguments[1] in (content["artifact"]["dtype"], content["artifact"]["quantize"])


def test_the_int8_file_holds_int8_weights_and_is_dynamic_per_channel(
    invoke: Invoke, vit_checkpoint: Path, tmp_path: Path
) -> None:
    kwargs = ("--model-kwargs", '{"num_heads": 2}')
    arguments = ("--quantize", "int8", "--min-agreement", "0")
    assert invoke(vit_checkpoint, *kwargs, *arguments, model="vit").exit_code == 0
    model = onnx.load(tmp_path / "repository" / "vit" / "1" / "model.onnx")
    kinds = {node.op_type for node in model.graph.node}
    assert {"DynamicQuantizeLinear", "MatMulInteger"} <= kinds
    scales = [t for t in model.graph.initializer if t.name.endswith("_scale") and t.dims]
    assert any(scale.dims[0] > 1 for scale in scales), "one scale for a whole tensor"


@pytest.mark.thorough
def test_int8_products_never_saturate_on_a_processor_without_vnni(
    invoke: Invoke, fraud_checkpoint: Path, held_out: Path, tmp_path: Path
) -> None:
    """AVX2's vpmaddubsw adds two products of an uint8 and an int8 in 16 bits."""
    arguments = ("--quantize", "int8", "--data", str(held_out), "--min-agreement", "0")
    assert invoke(fraud_checkpoint, *arguments).exit_code == 0
    model = onnx.load(tmp_path / "repository" / "fraud" / "1" / "model.onnx")
    weights = [
        onnx.numpy_helper.to_array(tensor).astype(int)
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) == 2
    ]
    assert weights
    assert max(2 * 255 * np.abs(each).max() for each in weights) < 2**15


@pytest.mark.thorough
def test_too_many_changed_decisions_exit_3_and_leave_the_repository_as_it_was(
    invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "to_dynamic_int8", spoiling(lambda array: -array))
    said = failed(invoke(fraud_checkpoint, "--quantize", "int8"), 3)
    assert "decisions agree on" in said
    assert "below 97.00%" in said
    assert not (tmp_path / "repository").exists()


@pytest.mark.thorough
def test_a_metric_that_falls_exits_3(
    invoke: Invoke, fraud_checkpoint: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        quantization, "to_dynamic_int8", spoiling(np.random.default_rng(0).permutation)
    )
    arguments = ("--quantize", "int8", "--data", str(held_out), "--min-agreement", "0")
    said = failed(invoke(fraud_checkpoint, *arguments), 3)
    assert "AUC falls from" in said
    assert "'held-out.npz'" in said


def test_a_model_without_a_decision_is_held_to_a_relative_error(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "regression.py").write_text("from torch.nn import Linear as Net\n")
    torch.manual_seed(0)
    torch.save(nn.Linear(16, 4).state_dict(), tmp_path / "net.pt")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ("--model-kwargs", '{"in_features": 16, "out_features": 4}', "--dtype", "fp16")
    strict = ("--max-relative-error", "1e-9")
    said = failed(invoke(tmp_path / "net.pt", *arguments, *strict, model="regression:Net"), 3)
    assert "ratio of L2 norms" in said
    assert invoke(tmp_path / "net.pt", *arguments, model="regression:Net").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ("--dtype", "bf16"),
            4,
            "cannot be converted to onnx in bf16; use --format torchscript",
        ),
        (("--format", "torchscript", "--quantize", "int8"), 4, "use --format onnx or tflite"),
        (
            ("--quantize", "int2"),
            4,
            "'int2' is not supported; use int8 or int8-weight-only or int4",
        ),
        (("--quantize", "int8", "--dtype", "fp16"), 2, "are mutually exclusive"),
        (("--format", "torchscript", "--opset", "20"), 2, "--opset is for ONNX only"),
        (("--max-drop", "nan"), 2, "--max-drop must be a finite number"),
        (("--data", __file__), 2, "is not a readable .npz file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_a_format_has_no_precision_for_is_one_line(
    invoke: Invoke,
    fraud_checkpoint: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    assert said in failed(invoke(fraud_checkpoint, *arguments), code)
    assert not (tmp_path / "repository").exists()


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"tokens": np.zeros((3, 4), np.int64)}, "has no input 'seq_lens'; it has tokens"),
        (
            {"tokens": np.zeros((3, 4), np.int32), "seq_lens": np.ones(3, np.int64)},
            "'tokens' is int32, the signature says INT64",
        ),
        (
            {"tokens": np.zeros((3, 4), np.int64), "seq_lens": np.ones(2, np.int64)},
            "the numbers of rows differ",
        ),
        (
            {"tokens": np.zeros((3, 4, 1), np.int64), "seq_lens": np.ones(3, np.int64)},
            "'tokens' is [3, 4, 1], the signature says [N, *[-1]]",
        ),
    ],
    ids=["an input missing", "datatype", "rows", "shape"],
)
def test_held_out_data_that_does_not_fit_is_named(
    invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path, arrays: Any, said: str
) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)
    assert said in failed(invoke(fraud_checkpoint, "--data", str(tmp_path / "bad.npz")), 2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"labels": np.int64(1)}, "must be finite numbers, one for each row; it is int64 []"),
        ({"labels": np.array(["a", "b"] * (ROWS // 2))}, "must be finite numbers"),
        ({"labels": np.zeros(ROWS, np.int64)}, "must hold two classes"),
        ({"labels": np.arange(ROWS)}, "must hold two classes"),
        ({"labels": np.eye(ROWS)}, "'labels' is [60, 60], the model's decisions are [60]"),
        ({"tokens": np.full((ROWS, 12), 99)}, "the checkpoint fails on rows 0 and up of --data"),
    ],
    ids=["a scalar", "text", "one class", "many classes", "a matrix", "beyond the vocabulary"],
)
def test_held_out_data_that_says_nothing_is_refused(
    invoke: Invoke, fraud_checkpoint: Path, held_out: Path, tmp_path: Path, arrays: Any, said: str
) -> None:
    with np.load(held_out) as good:
        np.savez(held_out.with_name("bad.npz"), **{**good, **arrays})
    data = ("--data", str(held_out.with_name("bad.npz")))
    assert said in failed(invoke(fraud_checkpoint, "--quantize", "int8", *data), 2)
    assert not (tmp_path / "repository").exists()


def test_a_file_of_one_array_is_no_held_out_data(
    invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "one.npy", np.zeros(3))
    data = ("--data", str(tmp_path / "one.npy"))
    assert "is not a readable .npz" in failed(invoke(fraud_checkpoint, *data), 2)


def _source(values: Any, decision: Decision | None) -> Source:
    """A model that answers with ``values`` row by row, whatever it is given."""
    values = np.asarray(values)
    inputs = (TensorSpec("row", Datatype.INT64, (1,)),)
    outputs = (TensorSpec("y", Datatype.FP32, values.shape[1:]),)
    signature = ModelSignature(inputs, outputs, max_batch_size=8)
    spec = ModelSpec("fake", lambda *_: signature, decision=decision)
    return Source(Framework.PYTORCH, None, spec, signature, _answering(values), 1, ())


def _answering(values: Any) -> Any:
    return lambda batch: {"y": np.asarray(values)[batch["row"][:, 0]]}


def _rows(count: int, labels: Any = None) -> HeldOut:
    return HeldOut("rows.npz", "", {"row": np.arange(count)[:, None]}, labels)


def test_labels_in_a_column_are_compared_row_by_row() -> None:
    values = np.eye(10, dtype=np.float32)
    source = _source(values, Decision("y"))
    data = _rows(10, np.arange(10)[:, None])
    found = evaluation.evaluate(source, _answering(values), data, None, 0.0)
    assert found.artifact == found.reference == 1.0


def test_an_artifact_that_overflows_on_held_out_data_is_refused() -> None:
    good = np.ones((4, 2), np.float32)
    bad = np.where(np.arange(4)[:, None] == 2, np.float32("nan"), good)
    bounds = Bounds(agreement=0.0, relative_error=1.0)
    with pytest.raises(ParityError, match=r"the artifact fails on rows .* not finite"):
        evaluation.evaluate(_source(good, None), _answering(bad), _rows(4), bounds, 0.0)


def test_values_without_a_sign_are_compared_as_numbers() -> None:
    values = np.array([[True], [False]])
    bounds = Bounds(agreement=0.0, relative_error=0.1)
    source = _source(values, None)
    assert evaluation.evaluate(source, _answering(values), _rows(2), bounds, 0.0).rows == 2
    with pytest.raises(ParityError, match="values differ by 100"):
        evaluation.evaluate(source, _answering(values & False), _rows(2), bounds, 0.0)


def test_pickled_held_out_data_is_not_executed(
    invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path
) -> None:
    bomb = PickleBomb(tmp_path / "exploded")
    np.savez(tmp_path / "bad.npz", tokens=np.array([bomb], dtype=object))
    assert "is not a readable .npz" in failed(
        invoke(fraud_checkpoint, "--data", str(tmp_path / "bad.npz")), 2
    )
    assert not (tmp_path / "exploded").exists()
