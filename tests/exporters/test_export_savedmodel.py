"""SavedModels carry the signature's names, each weight once, nothing of ours, and warm-up."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from modelport.exporters.formats import savedmodel
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.keras_ports import find_port
from modelport.exporters.keras_ports.weights import port
from modelport.exporters.loaded_model import Framework, Source
from modelport.exporters.lowering.operators import OPERATORS
from modelport.exporters.models.fraud import FraudTransformer
from modelport.exporters.models.vit import VisionTransformer
from modelport.exporters.publishing import tensorflow_serving_warmup
from modelport.exporters.publishing.proto import prediction_log_pb2
from modelport.exporters.requests.random_inputs import draw
from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.exporters.sources.pytorch import source
from modelport.gateway.cli.errors import exit_code
from modelport.gateway.errors import IntegrityError, Unsupported
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec
from tests.torch_subjects import fp32, subject, worst

ROOT = Path(__file__).resolve().parents[2]

FRAUD_KWARGS: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "nhead": 4,
    "num_layers": 1,
    "dim_feedforward": 48,
    "max_positions": 16,
}
VIT_KWARGS: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "in_channels": 3,
    "num_classes": 5,
    "dim": 16,
    "depth": 1,
    "num_heads": 2,
    "mlp_dim": 24,
}
COARSE = {"fp16": 0.01, "bf16": 0.08}


def loaded(factory: Any, kwargs: dict[str, Any]) -> Source:
    torch.manual_seed(0)
    module: nn.Module = factory(**kwargs)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    spec = factory.modelport_spec
    return source(module, spec, spec.signature(module, 8), model_kwargs=kwargs)


@pytest.fixture(scope="module")
def fraud_source() -> Source:
    return loaded(FraudTransformer, FRAUD_KWARGS)


@pytest.fixture(scope="module")
def vit_source() -> Source:
    return loaded(VisionTransformer, VIT_KWARGS)


@pytest.fixture(scope="module")
def fraud_path(fraud_source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fraud") / "model.savedmodel"
    savedmodel.export(fraud_source, path, ExportTarget())
    return path


@pytest.fixture(scope="module")
def vit_path(vit_source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vit") / "model.savedmodel"
    savedmodel.export(vit_source, path, ExportTarget())
    return path


def worst_error(source: Source, session: Any, lengths: tuple[int, ...]) -> float:
    rng, worst = np.random.default_rng(0), 0.0
    for batch in (1, 2, 8):
        for length in lengths:
            inputs = draw(source.signature, batch, {"sequence": length}, rng)
            expected, actual = source.reference(inputs), session(inputs)
            assert actual.keys() == expected.keys()
            for name, value in expected.items():
                assert actual[name].shape == value.shape
                assert actual[name].dtype == value.dtype
                worst = max(worst, float(np.abs(actual[name] - value).max()))
    return worst


def weight_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("variables/variables.data-*"))


@pytest.mark.thorough
def test_fraud_agrees_with_eager_at_every_batch_and_length(
    fraud_source: Source, fraud_path: Path
) -> None:
    session = savedmodel.open_session(fraud_path)
    assert sorted(session.inputs) == ["seq_lens", "tokens"]
    assert session.outputs == ["probability"]
    assert worst_error(fraud_source, session, (1, 8, 16)) < 1e-6


@pytest.mark.thorough
def test_vit_agrees_with_eager_at_every_batch(vit_source: Source, vit_path: Path) -> None:
    session = savedmodel.open_session(vit_path)
    assert (session.inputs, session.outputs) == (["image"], ["logits"])
    assert worst_error(vit_source, session, (0,)) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_is_inside_only_and_halves_the_file(
    fraud_source: Source, fraud_path: Path, tmp_path: Path, dtype: str
) -> None:
    savedmodel.export(fraud_source, tmp_path / "half", ExportTarget(dtype))
    session = savedmodel.open_session(tmp_path / "half")
    assert 0 < worst_error(fraud_source, session, (1, 16)) < COARSE[dtype]
    assert weight_bytes(tmp_path / "half") < 0.6 * weight_bytes(fraud_path)


def test_a_length_of_zero_or_past_the_end_is_clamped(
    fraud_source: Source, fraud_path: Path
) -> None:
    session = savedmodel.open_session(fraud_path)
    inputs = {"tokens": np.arange(12).reshape(3, 4), "seq_lens": np.array([0, -1, 99])}
    expected, actual = fraud_source.reference(inputs), session(inputs)
    np.testing.assert_allclose(actual["probability"], expected["probability"], atol=1e-6)


@pytest.mark.thorough
def test_exporting_says_nothing(
    fraud_source: Source, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    savedmodel.export(fraud_source, tmp_path / "model", ExportTarget())
    savedmodel.open_session(tmp_path / "model")
    assert capfd.readouterr() == ("", "")


@pytest.mark.thorough
def test_every_weight_is_written_once_and_outputs_keep_their_names(
    fraud_source: Source, fraud_path: Path, tmp_path: Path
) -> None:
    values = 4 * fraud_source.parameter_count
    # small vectors are constants of the graph
    assert 0.95 * values < weight_bytes(fraud_path) < 1.2 * values
    keras_port = find_port("modelport.exporters.keras_ports.fraud:PORT")
    model = keras_port.build(FRAUD_KWARGS, "float32")
    port(fraud_source.model.state_dict(), model, keras_port.links(FRAUD_KWARGS))
    model.export(tmp_path / "naive", verbose=False)
    assert weight_bytes(tmp_path / "naive") > 2 * values


def test_only_the_model_is_inside(fraud_path: Path) -> None:
    files = {p.relative_to(fraud_path).as_posix() for p in fraud_path.rglob("*") if p.is_file()}
    assert files == {
        "fingerprint.pb",
        "saved_model.pb",
        "variables/variables.data-00000-of-00001",
        "variables/variables.index",
    }
    content = b"".join((fraud_path / name).read_bytes() for name in files)
    for trace in (str(ROOT), sys.prefix, str(Path.home()), "/tmp", ".py"):
        assert trace.encode() not in content


@pytest.mark.thorough
def test_it_is_served_without_keras_and_without_this_project(
    fraud_source: Source, fraud_path: Path, tmp_path: Path
) -> None:
    inputs = draw(fraud_source.signature, 2, {"sequence": 5}, np.random.default_rng(0))
    np.savez(tmp_path / "inputs.npz", **inputs)
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('keras', 'exporters', 'gateway', 'torch')))\n"
        "import numpy as np, tensorflow as tf\n"
        "model = tf.saved_model.load(sys.argv[1])\n"
        "inputs = {k: tf.constant(v) for k, v in np.load('inputs.npz').items()}\n"
        "outputs = model.signatures['serving_default'](**inputs)\n"
        "np.savez('outputs.npz', **{k: v.numpy() for k, v in outputs.items()})\n"
    )
    command = [sys.executable, "-c", script, str(fraud_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "outputs.npz") as outputs:
        expected = fraud_source.reference(inputs)["probability"]
        np.testing.assert_allclose(outputs["probability"], expected, atol=1e-6)


def test_inputs_of_another_datatype_are_refused(fraud_path: Path) -> None:
    session = savedmodel.open_session(fraud_path)
    inputs = {"tokens": np.zeros((1, 3), np.int32), "seq_lens": np.array([3])}
    with pytest.raises((TypeError, tf.errors.InvalidArgumentError)):
        session(inputs)


def _no_graph(path: Path) -> None:
    (path / "saved_model.pb").unlink()


def _half_a_graph(path: Path) -> None:
    content = (path / "saved_model.pb").read_bytes()
    (path / "saved_model.pb").write_bytes(content[: len(content) // 2])


def _half_the_weights(path: Path) -> None:
    (weights,) = path.glob("variables/variables.data-*")
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def _no_weights(path: Path) -> None:
    shutil.rmtree(path / "variables")


@pytest.mark.parametrize("damage", [_no_graph, _half_a_graph, _half_the_weights, _no_weights])
def test_a_damaged_savedmodel_is_one_line(fraud_path: Path, tmp_path: Path, damage: Any) -> None:
    shutil.copytree(fraud_path, tmp_path / "damaged")
    damage(tmp_path / "damaged")
    said = r"'damaged' (is not a complete SavedModel|does not load: .* is damaged)"
    with pytest.raises(IntegrityError, match=said) as caught:
        savedmodel.open_session(tmp_path / "damaged")
    assert "\n" not in str(caught.value)
    assert exit_code(caught.value) == 5


def test_a_savedmodel_without_the_signature_is_refused(tmp_path: Path) -> None:
    tf.saved_model.save(tf.Module(), str(tmp_path / "bare"))
    with pytest.raises(IntegrityError, match="no signature 'serving_default'"):
        savedmodel.open_session(tmp_path / "bare")


class Doubling(tf.Module):  # type: ignore[misc]
    """A TensorFlow model that takes whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = tf.Variable(2.0)

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"doubled": sum(inputs.values()) * self.factor, "unwanted": self.factor}


def tensorflow_source(model: Any, *names: str) -> Source:
    inputs = tuple(TensorSpec(name, Datatype.FP32, (3, -1)) for name in names)
    outputs = (TensorSpec("doubled", Datatype.FP32, (3, -1)),)
    spec = replace(FraudTransformer.modelport_spec, name="own", keras_port=None)
    signature = ModelSignature(inputs, outputs, 8)
    return Source(Framework.TENSORFLOW, model, spec, signature, lambda inputs: {}, 1, ())


def test_a_tensorflow_model_keeps_the_names_of_its_signature(tmp_path: Path) -> None:
    savedmodel.export(
        tensorflow_source(Doubling(), "x", "inputs"), tmp_path / "own", ExportTarget()
    )
    session = savedmodel.open_session(tmp_path / "own")
    assert (sorted(session.inputs), session.outputs) == (["inputs", "x"], ["doubled"])
    for batch, width in ((1, 1), (2, 5)):
        ones = np.ones((batch, 3, width), np.float32)
        np.testing.assert_array_equal(session({"x": ones, "inputs": 2 * ones})["doubled"], 6 * ones)


class Apart(nn.Module):
    """The difference of two inputs, whose names have capital letters."""

    def forward(self, X: torch.Tensor, idsB: torch.Tensor) -> torch.Tensor:  # noqa: N803
        return X - 2 * idsB


def test_capital_letters_in_names_are_kept(tmp_path: Path) -> None:
    signature = ModelSignature((fp32("X", 3), fp32("idsB", 3)), (fp32("y", 3),), 4)
    model = subject(Apart().eval(), signature)
    savedmodel.export(model, tmp_path / "apart", ExportTarget())
    assert worst(model, savedmodel.open_session(tmp_path / "apart")) < 1e-6
    with pytest.raises(Unsupported, match="input names 'X' and 'x'"):
        savedmodel.export(tensorflow_source(Doubling(), "X", "x"), tmp_path, ExportTarget())


@pytest.mark.parametrize("name", ["my-input", "input:0", "_x", "1st", "class", "self", "größe"])
def test_a_name_that_tensorflow_would_replace_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(Unsupported, match=f"does not accept the input name '{name}'"):
        savedmodel.export(tensorflow_source(Doubling(), name), tmp_path / "own", ExportTarget())
    assert not (tmp_path / "own").exists()


def test_a_model_that_cannot_be_traced_is_one_line(tmp_path: Path) -> None:
    class UntraceableDoubling(Doubling):
        def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
            return {"doubled": tf.ensure_shape(inputs["x"], (None, 4, None))}

    with pytest.raises(Unsupported, match="TensorFlow cannot save this model") as caught:
        savedmodel.export(
            tensorflow_source(UntraceableDoubling(), "x"), tmp_path / "own", ExportTarget()
        )
    assert "\n" not in str(caught.value)
    assert "user code" not in str(caught.value)


def test_an_operator_that_the_table_lacks_is_named_with_the_module_it_stems_from(
    fraud_source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(OPERATORS, "sigmoid")
    with pytest.raises(Unsupported, match=r"operator 'sigmoid' of .*, fraud.py line \d+") as caught:
        savedmodel.export(fraud_source, tmp_path / "model", ExportTarget())
    assert exit_code(caught.value) == 4
    assert "use --format torchscript, pt2 or onnx" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_warm_up_requests_are_read_back_and_run(
    fraud_source: Source, fraud_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.savedmodel"
    shutil.copytree(fraud_path, path)
    rng = np.random.default_rng(0)
    requests = [draw(fraud_source.signature, batch, {"sequence": 16}, rng) for batch in (1, 8)]
    tensorflow_serving_warmup.write(path, "scorer", requests)

    session, outputs = savedmodel.open_session(path), []
    file = path / "assets.extra" / "tf_serving_warmup_requests"
    for record in tf.data.TFRecordDataset(str(file)):
        log = prediction_log_pb2.PredictionLog.FromString(record.numpy())
        assert log.WhichOneof("log_type") == "predict_log"
        request = log.predict_log.request
        assert request.model_spec.name == "scorer"
        assert request.model_spec.signature_name == "serving_default"
        inputs = {name: tf.make_ndarray(tensor) for name, tensor in request.inputs.items()}
        outputs.append(session(inputs)["probability"])
    for request, output in zip(requests, outputs, strict=True):
        expected = fraud_source.reference(request)["probability"]
        np.testing.assert_allclose(output, expected, atol=1e-6)


def test_warm_up_messages_have_the_field_numbers_of_tensorflow_serving() -> None:
    """From its ``model.proto``, ``predict.proto`` and ``prediction_log.proto``."""
    log = prediction_log_pb2.PredictionLog()
    request = log.predict_log.request
    request.model_spec.name = "m"
    request.model_spec.signature_name = "s"
    spec = b"\x0a\x01m" + b"\x1a\x01s"  # name 1, signature_name 3
    assert request.SerializeToString() == b"\x0a\x06" + spec  # model_spec 1
    assert log.SerializeToString() == b"\x32\x0a\x0a\x08\x0a\x06" + spec  # predict_log 6, request 1
    request.inputs["x"].dtype = 1
    entry = b"\x0a\x01x" + b"\x12\x02\x08\x01"
    assert request.SerializeToString().endswith(b"\x12\x07" + entry)  # inputs 2
