"""Silent errors of naive exports, which modelport's exports avoid.

Every test shows the harm first, so that one whose trap is gone fails and can go too.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import quantize_dynamic
from torch import Tensor, nn

from modelport.exporters.errors import ParityError
from modelport.exporters.formats import onnx as onnx_format
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import find_format
from modelport.exporters.keras_ports import find_port
from modelport.exporters.loaded_model import Source
from modelport.exporters.models.fraud import FraudTransformer
from modelport.exporters.optimization import quantization
from modelport.exporters.proof import parity
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.tensorflow_runtime import keras, tf
from modelport.exporters.sources.pytorch import source
from modelport.exporters.sources.torch_eager import inference_mode
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.validation import Validator
from modelport.gateway.repository import config
from modelport.gateway.types import Datatype, InferRequest, ModelSignature
from modelport.gateway.types import Tensor as WireTensor
from tests.exporters.economy import identity
from tests.thorough import sampled, thorough
from tests.torch_subjects import fp32, subject

FOUR = ("onnx", "torchscript", "savedmodel", "tflite")
KWARGS = {
    "vocab_size": 32,
    "d_model": 16,
    "nhead": 2,
    "num_layers": 2,
    "dim_feedforward": 24,
    "max_positions": 12,
}


def loaded(module: Any) -> Source:
    spec = module.modelport_spec
    kwargs = KWARGS if isinstance(module, FraudTransformer) else VIT
    return source(module, spec, spec.signature(module, 8), model_kwargs=kwargs)


VIT: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "in_channels": 1,
    "num_classes": 5,
    "dim": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_dim": 24,
}
TOKENS = torch.randint(0, 32, (3, 12), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([3, 7, 12])


class MeanOverEverything(FraudTransformer):
    """The naive pool: the mean over padding too, nested tensors left on."""

    def __init__(self) -> None:
        super().__init__(**KWARGS)
        self.encoder.enable_nested_tensor = True
        self.encoder.use_nested_tensor = True

    def forward(self, tokens: Tensor, seq_lens: Tensor) -> Tensor:
        steps = torch.arange(tokens.shape[1])
        padding = steps >= seq_lens.unsqueeze(1)
        hidden = self.embedding(tokens) + self.positions(steps)
        hidden = self.encoder(hidden, src_key_padding_mask=padding)
        return torch.sigmoid(self.head(hidden.mean(dim=1)).squeeze(-1))


@pytest.fixture
def naive(fraud: nn.Module) -> nn.Module:
    module = MeanOverEverything()
    module.load_state_dict(fraud.state_dict())
    return module.eval()


def scores(module: nn.Module, lengths: Tensor, fast: bool) -> Any:
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        with torch.no_grad(), quiet():
            return module(TOKENS, lengths).numpy()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[nn.Module, str], Any]:
    """An opened artifact of a module in a format, made once."""
    made: dict[str, Path] = {}

    def make(module: nn.Module, name: str) -> Any:
        row = find_format(name)
        key = f"{name} {identity(module, (), {})}"
        if key not in made:
            path = tmp_path_factory.mktemp(name) / row.platform.default_filename
            row.export(loaded(module), path, ExportTarget())
            made[key] = path
        return row.open_session(made[key])

    return make


def test_1_the_mean_over_padding_depends_on_the_path_a_runtime_takes(
    naive: nn.Module, fraud: nn.Module
) -> None:
    harm = np.abs(scores(naive, LENGTHS, fast=True) - scores(naive, LENGTHS, fast=False)).max()
    assert harm > 1e-3
    ours = np.abs(scores(fraud, LENGTHS, fast=True) - scores(fraud, LENGTHS, fast=False)).max()
    assert ours < 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize("name", FOUR)
def test_2_a_length_of_zero_is_nan_here_and_a_number_there(
    naive: nn.Module, fraud: nn.Module, name: str, artifacts: Any
) -> None:
    zero = torch.tensor([0, 7, 12])
    fast, slow = scores(naive, zero, fast=True), scores(naive, zero, fast=False)
    assert not np.allclose(fast, slow, atol=1e-3), "NaN in one of them, or another number"
    inputs = {"tokens": TOKENS.numpy(), "seq_lens": zero.numpy()}
    found = artifacts(fraud, name)(inputs)["probability"]
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, scores(fraud, zero, fast=False), atol=1e-6)


def test_3_tracing_with_gradients_and_an_example_batch_of_one_bake_the_batch_in(
    fraud: nn.Module, artifacts: Any
) -> None:
    frozen = fraud.requires_grad_(True)
    with warnings.catch_warnings(action="ignore"):
        traced = torch.jit.trace(frozen, (TOKENS, LENGTHS), check_trace=False)
        assert any(p.requires_grad for p in traced.parameters()), "a trace that can be frozen"
    batch = torch.export.Dim("batch", min=1, max=8)
    shapes = ({0: batch}, {0: batch})
    with quiet(), pytest.raises(Exception, match=r"batch|specializ|[Cc]onstraint"):
        torch.export.export(frozen, (TOKENS[:1], LENGTHS[:1]), dynamic_shapes=shapes)
    session = artifacts(fraud, "torchscript")
    for rows in (1, 2, 3):
        inputs = {"tokens": TOKENS[:rows].numpy(), "seq_lens": LENGTHS[:rows].numpy()}
        assert session(inputs)["probability"].shape == (rows,)


def test_4_the_fast_path_is_baked_into_a_naive_trace(fraud: nn.Module, tmp_path: Path) -> None:
    fused = "_transformer_encoder_layer_fwd"
    with torch.no_grad(), quiet():
        naive = torch.jit.trace(fraud, (TOKENS, LENGTHS), check_trace=False)
        assert fused in str(naive.inlined_graph)
    find_format("torchscript").export(loaded(fraud), tmp_path / "model.pt", ExportTarget())
    with quiet():
        assert fused not in str(torch.jit.load(tmp_path / "model.pt").inlined_graph)


@pytest.mark.thorough
def test_5_keras_own_export_renames_outputs_and_writes_variables_twice(
    vit: nn.Module, tmp_path: Path
) -> None:
    port = find_port(vit.modelport_spec.keras_port)
    with quiet():
        port.build(VIT, "float32").export(str(tmp_path / "naive"), verbose=False)
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="logits")]).export(
            str(tmp_path / "renamed"), verbose=False
        )
    renamed = tf.saved_model.load(str(tmp_path / "renamed")).signatures["serving_default"]
    assert list(renamed.structured_outputs) == ["output_0"]
    find_format("savedmodel").export(loaded(vit), tmp_path / "ours", ExportTarget())
    ours = tf.saved_model.load(str(tmp_path / "ours")).signatures["serving_default"]
    assert list(ours.structured_outputs) == ["logits"]
    twice = _variable_bytes(tmp_path / "naive") - _variable_bytes(tmp_path / "ours")
    assert twice > 0.9 * sum(p.numel() * p.element_size() for p in vit.parameters())


def _variable_bytes(savedmodel: Path) -> int:
    return sum(path.stat().st_size for path in (savedmodel / "variables").glob("*.data*"))


def test_6_layers_that_are_clones_hide_a_swapped_pair(fraud: nn.Module) -> None:
    torch.manual_seed(0)
    untrained = FraudTransformer(**KWARGS).eval()
    swapped = FraudTransformer(**KWARGS).eval()
    swapped.load_state_dict(_swapped(untrained))
    with inference_mode(untrained):
        assert torch.equal(untrained(TOKENS, LENGTHS), swapped(TOKENS, LENGTHS))
    swapped.load_state_dict(_swapped(fraud))
    session = Eager(swapped)
    with pytest.raises(ParityError, match="'probability' differs"):
        parity.check(loaded(fraud), session, samples=1, seed=0, atol=5e-6, rtol=1e-5)


def _swapped(module: nn.Module) -> dict[str, Tensor]:
    names = {"encoder.layers.0": "encoder.layers.1", "encoder.layers.1": "encoder.layers.0"}
    return {
        names.get(key[:16], key[:16]) + key[16:]: value
        for key, value in module.state_dict().items()
    }


class Eager:
    """A module as an artifact."""

    inputs, outputs = ("tokens", "seq_lens"), ("probability",)

    def __init__(self, module: Any) -> None:
        self._source = loaded(module)

    def __call__(self, inputs: Any) -> Any:
        return self._source.reference(inputs)


@pytest.mark.parametrize(
    ("tokens", "length", "said"),
    [
        thorough([[-1, 2, 3]], 3, "tokens"),
        ([[1, 2, 32]], 3, "tokens"),
        ([[1, 2, 3]], 4, "seq_lens"),
        ([[1] * 13], 3, "tokens"),
    ],
    ids=["token -1", "token past the vocabulary", "length past the sequence", "sequence too long"],
)
def test_7_ids_and_lengths_out_of_range_are_refused_before_a_runtime_sees_them(
    fraud: nn.Module, artifacts: Any, tokens: Any, length: int, said: str
) -> None:
    if tokens == [[-1, 2, 3]]:  # the harm: a token of -1 is taken for the last one
        naive = artifacts(fraud, "onnx")
        inputs = {"tokens": np.array(tokens), "seq_lens": np.array([length])}
        last = {"tokens": np.array([[31, 2, 3]]), "seq_lens": np.array([length])}
        assert naive(inputs)["probability"] == naive(last)["probability"]
    signature = fraud.modelport_spec.signature(fraud, 8)
    published = config.build("fraud", find_format("onnx").platform, signature)
    request = InferRequest(
        "fraud",
        [
            WireTensor("tokens", Datatype.INT64, np.array(tokens)),
            WireTensor("seq_lens", Datatype.INT64, np.array([[length]])),
        ],
    )
    validator = Validator("fraud", config.signature(config.parse(config.to_text(published))))
    with pytest.raises(InvalidArgument, match=said):
        validator.check(request)


@pytest.mark.thorough
def test_8_tflite_orders_inputs_as_it_likes_and_is_strict_about_datatypes(
    fraud: nn.Module, artifacts: Any
) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.float32)])
    def indexed(x: Any) -> Any:
        return x[:, :, None] * 2.0

    converter = tf.lite.TFLiteConverter.from_concrete_functions([indexed.get_concrete_function()])
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
    with quiet(), pytest.raises(Exception, match="NEEDS_FLEX_OPS"):
        converter.convert()
    session = artifacts(fraud, "tflite")
    backwards = {"seq_lens": LENGTHS.numpy(), "tokens": TOKENS.numpy()}
    expected = scores(fraud, LENGTHS, fast=False)
    np.testing.assert_allclose(session(backwards)["probability"], expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"INT64|type"):
        session({"seq_lens": LENGTHS.numpy(), "tokens": TOKENS.numpy().astype(np.int32)})


def test_9_dynamic_quantisation_ignores_contradicting_shapes_that_the_exporter_left(
    vit: nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    onnx_format.export(loaded(vit), path, ExportTarget(opset=20))
    model = onnx.load(path)
    for value in model.graph.value_info:  # as those that the exporter writes may be
        value.type.tensor_type.shape.dim.add(dim_value=7)
    onnx.save(model, path)
    with quiet(), pytest.raises(Exception, match=r"[Ii]nfer"):
        quantize_dynamic(path, tmp_path / "naive.onnx", per_channel=True)
    quantized = tmp_path / "quantized.onnx"
    quantization.to_dynamic_int8(path, quantized, per_channel=True, external_data=False)
    assert "MatMulInteger" in {node.op_type for node in onnx.load(quantized).graph.node}


def test_10_large_weights_lie_beside_the_model_and_must_travel_with_it(
    invoke: Any, vit_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_format, "EXTERNAL_DATA_BYTES", 1000)
    done = invoke(vit_checkpoint, "--model-kwargs", '{"num_heads": 2}', model="vit")
    assert done.exit_code == 0, done.stderr
    version = tmp_path / "repository" / "vit" / "1"
    (tmp_path / "naive").mkdir()
    shutil.copy(version / "model.onnx", tmp_path / "naive")
    with pytest.raises(Exception, match=r"model.onnx.data"):
        onnxruntime.InferenceSession(tmp_path / "naive" / "model.onnx")
    listed = (version / "manifest.json").read_text()
    assert '"model.onnx.data"' in listed
    assert '"model.onnx.data"' in (version / "certificate.json").read_text()


@pytest.mark.parametrize("naive", ["approximate GELU", "Keras' own epsilon"])
def test_11_defaults_differ_between_frameworks(vit: nn.Module, naive: str) -> None:
    if naive == "approximate GELU":
        spoiled = nn.GELU(approximate="tanh")
        for block in (copied := _copy(vit)).blocks:
            block.mlp.act = spoiled
    else:
        for layer in (copied := _copy(vit)).modules():
            if isinstance(layer, nn.LayerNorm):
                layer.eps = keras.layers.LayerNormalization().epsilon
    session = NamedEager(copied)
    spec = vit.modelport_spec
    with pytest.raises(ParityError, match="'logits' differs"):
        parity.check(loaded(vit), session, samples=1, seed=0, atol=spec.atol, rtol=spec.rtol)


def _copy(vit: Any) -> Any:
    copied = type(vit)(**VIT)
    copied.load_state_dict(vit.state_dict())
    return copied.eval()


class NamedEager(Eager):
    inputs, outputs = ("image",), ("logits",)  # type: ignore[assignment]


def test_12_a_forgotten_eval_leaves_dropout_on(fraud: nn.Module, artifacts: Any) -> None:
    module = FraudTransformer(**KWARGS, dropout=0.3)
    module.load_state_dict(fraud.state_dict())
    module.train()
    with torch.no_grad():
        assert np.abs((module(TOKENS, LENGTHS) - fraud(TOKENS, LENGTHS)).numpy()).max() > 0.01
    inputs = {"tokens": TOKENS.numpy(), "seq_lens": LENGTHS.numpy()}
    found = artifacts(module.train(), "torchscript")(inputs)["probability"]
    np.testing.assert_allclose(found, scores(fraud, LENGTHS, fast=False), atol=1e-6)


def test_13_hugging_face_names_the_same_weights_in_two_ways_and_timm_in_a_third() -> None:
    """``test_export_huggingface`` loads both of them; loading by name alone loads neither."""
    from transformers import ViTConfig, ViTForImageClassification

    theirs = ViTForImageClassification(
        ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    )
    ours = set(_keys_of_ours())
    assert not ours & set(theirs.state_dict())


def _keys_of_ours() -> list[str]:
    from modelport.exporters.models.vit import VisionTransformer

    return list(VisionTransformer(**VIT).state_dict())


class ConstantsNearZeroAndOne(nn.Module):
    """Expressions with a constant that a rewriter may take for 0 or 1, or move past a sum or a
    product."""

    CONSTANTS = (1e-9, -1e-12, 1e-37, 1.000005, 0.999999)
    SIGNATURE = ModelSignature((fp32("y", 4),), (fp32("out", -1),), 8)
    INPUTS = np.array(
        [[0, 0, 0, 0], [3, 3, 3, 3], [1, 2, 3, 4], [1e-20] * 4, [-1e-9, 0, 0, 1e-9], [1e8] * 4],
        np.float32,
    )

    def forward(self, y: Tensor) -> Tensor:
        low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
        found = [y / (y.norm(dim=-1, keepdim=True) + 1e-9), (y - low) / (high - low + 1e-9)]
        for c in self.CONSTANTS:
            found += [low + c, c + low, low - c, c - low, low * c, c * low, low / c]
            found += [(high - low) + c, c + (high - low), c - (high - low), (high + low) - c]
            found += [(high * low) * c, c * (high / (low + c)), (high / (low + c)) / c]
        return torch.cat(found, -1)


@pytest.mark.parametrize("name", sampled(("onnx", "savedmodel", "tflite"), "onnx"))
def test_14_small_constants_vanish_or_move(name: str, tmp_path: Path) -> None:
    module, inputs = ConstantsNearZeroAndOne().eval(), ConstantsNearZeroAndOne.INPUTS
    row = find_format(name)
    path = tmp_path / row.platform.default_filename
    row.export(subject(module, module.SIGNATURE), path, ExportTarget())
    expected = module(torch.from_numpy(inputs)).numpy()
    found = row.open_session(path)({"y": inputs})["out"]
    # TensorFlow's threads take subnormal numbers for 0.
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2 * np.finfo(np.float32).tiny)


@pytest.mark.thorough
def test_14_shown_for_the_converters_as_they_are(tmp_path: Path) -> None:
    module, zero = ConstantsNearZeroAndOne().eval(), torch.zeros(2, 4)
    with quiet():
        program = torch.onnx.export(module, (zero,), dynamo=True, verbose=False)
    assert program is not None
    program.save(tmp_path / "naive.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "naive.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: zero.numpy()})
    assert np.isnan(found).any()
    assert module(zero).isfinite().all()

    @tf.function  # type: ignore[untyped-decorator]
    def between(y: Any) -> Any:
        low, high = tf.reduce_min(y), tf.reduce_max(y)
        return (y - low) / (high - low + 1e-9)

    assert np.isnan(between(tf.constant([3.0, 3.0]))).any()


class Logarithms(nn.Module):
    """Logarithms of sums of exponentials that no float holds."""

    SIGNATURE = ModelSignature((fp32("y", 4),), (fp32("out", -1),), 8)
    INPUTS = np.array(
        [
            [0, 0, 0, 0],
            [1, 2, 3, 4],
            [-14, 14, -30, 30],
            [-104, 90, -1e4, 1e4],
            [1e30, 0, -1e30, 1],
        ],
        np.float32,
    )

    def forward(self, y: Tensor) -> Tensor:
        other = y.flip(-1)
        found = [torch.logaddexp(y, other), torch.logaddexp2(y, other), torch.logaddexp(y, y)]
        found += [nn.functional.logsigmoid(y), nn.functional.softplus(y), y.log_softmax(-1)]
        return torch.cat([*found, y.logsumexp(-1, keepdim=True)], -1)


@pytest.mark.parametrize("name", sampled(("onnx", "savedmodel", "tflite"), "onnx"))
def test_15_exponentials_overflow_below_a_logarithm(name: str, tmp_path: Path) -> None:
    module, inputs = Logarithms().eval(), Logarithms.INPUTS
    row = find_format(name)
    path = tmp_path / row.platform.default_filename
    row.export(subject(module, module.SIGNATURE), path, ExportTarget())
    expected = module(torch.from_numpy(inputs)).numpy()
    found = row.open_session(path)({"y": inputs})["out"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_15_shown_for_the_converter_as_it_is(tmp_path: Path) -> None:
    module, inputs = Logarithms().eval(), Logarithms.INPUTS[3:4]
    with quiet():
        program = torch.onnx.export(module, (torch.zeros(1, 4),), dynamo=True, verbose=False)
    assert program is not None
    program.save(tmp_path / "naive.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "naive.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs})
    assert not np.isfinite(found).all()
    assert module(torch.from_numpy(inputs)).isfinite().all()
