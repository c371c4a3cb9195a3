"""TensorFlow Lite files run on LiteRT at any batch size and length, by built-in operators only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modelport.exporters.formats import tflite
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import FORMATS, check_route
from modelport.exporters.loaded_model import Framework, Source
from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.models.fraud import FraudTransformer
from modelport.exporters.models.vit import VisionTransformer
from modelport.exporters.requests.random_inputs import draw
from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.exporters.sources.pytorch import source
from modelport.gateway.cli.errors import exit_code
from modelport.gateway.errors import IntegrityError, Unsupported
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec
from tests.thorough import thorough

#: Wide enough for the converter to quantise: it leaves small matrices alone.
FRAUD_KWARGS: dict[str, Any] = {
    "vocab_size": 256,
    "d_model": 64,
    "nhead": 4,
    "num_layers": 1,
    "dim_feedforward": 96,
    "max_positions": 16,
}
VIT_KWARGS: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "in_channels": 3,
    "num_classes": 5,
    "dim": 64,
    "depth": 1,
    "num_heads": 2,
    "mlp_dim": 96,
}
TARGETS = {
    "fp32": ExportTarget(),
    "fp16": ExportTarget("fp16"),
    "int8": ExportTarget(quantize="int8"),
}
TOLERANCES = {
    "fraud": {"fp32": 1e-6, "fp16": 2e-3, "int8": 0.05},
    "vit": {"fp32": 1e-5, "fp16": 5e-3, "int8": 0.1},
}


def loaded(factory: Any, kwargs: dict[str, Any]) -> Source:
    torch.manual_seed(0)
    module: nn.Module = factory(**kwargs)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    spec = factory.modelport_spec
    return source(module, spec, spec.signature(module, 8), model_kwargs=kwargs)


class Exported:
    """A model, and one file in each precision."""

    def __init__(self, source: Source, folder: Path) -> None:
        self.source = source
        self.paths = {precision: folder / f"{precision}.tflite" for precision in TARGETS}
        for precision, target in TARGETS.items():
            tflite.export(source, self.paths[precision], target)

    def worst_error(self, precision: str, lengths: tuple[int, ...]) -> float:
        session = tflite.open_session(self.paths[precision])
        rng, worst = np.random.default_rng(0), 0.0
        for batch in (1, 8, 2):
            for length in lengths:
                inputs = draw(self.source.signature, batch, {"sequence": length}, rng)
                expected, actual = self.source.reference(inputs), session(inputs)
                assert actual.keys() == expected.keys()
                for name, value in expected.items():
                    assert actual[name].shape == value.shape
                    assert actual[name].dtype == value.dtype
                    worst = max(worst, float(np.abs(actual[name] - value).max()))
        return worst


@pytest.fixture(scope="module")
def fraud_files(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("fraud")
    return Exported(loaded(FraudTransformer, FRAUD_KWARGS), folder)


@pytest.fixture(scope="module")
def vit_files(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(loaded(VisionTransformer, VIT_KWARGS), tmp_path_factory.mktemp("vit"))


@pytest.fixture(params=["fraud", thorough("vit")])
def files(request: pytest.FixtureRequest) -> Exported:
    found: Exported = request.getfixturevalue(f"{request.param}_files")
    return found


@pytest.mark.parametrize("precision", TARGETS)
def test_every_precision_agrees_at_every_batch_and_length(files: Exported, precision: str) -> None:
    name = files.source.spec.name
    lengths = (1, 8, 16) if name == "fraud" else (0,)
    assert files.worst_error(precision, lengths) < TOLERANCES[name][precision]


def test_weights_are_halved_and_quartered(files: Exported) -> None:
    sizes = {name: path.stat().st_size for name, path in files.paths.items()}
    values = files.source.parameter_count
    graph = sizes["fp32"] - 4 * values
    assert 0 < graph < 80_000  # nothing is written twice, and no two layers were taken for one
    assert sizes["fp16"] - graph == pytest.approx(2 * values, rel=0.05)
    assert values < sizes["int8"] - graph < 1.4 * values  # biases and tables of norms stay


def test_inputs_are_bound_by_name_whatever_their_order(fraud_files: Exported) -> None:
    session = tflite.open_session(fraud_files.paths["fp32"])
    assert sorted(session.inputs) == ["seq_lens", "tokens"]
    assert session.outputs == ["probability"]
    inputs = {"tokens": np.arange(12).reshape(2, 6), "seq_lens": np.array([6, 2])}
    backward = dict(reversed(inputs.items()))
    expected = fraud_files.source.reference(inputs)["probability"]
    for each in (inputs, backward):
        np.testing.assert_allclose(session(each)["probability"], expected, atol=1e-6)


def test_an_input_of_another_datatype_or_name_is_an_error(fraud_files: Exported) -> None:
    session = tflite.open_session(fraud_files.paths["fp32"])
    tokens, seq_lens = np.zeros((1, 3), np.int64), np.array([3])
    for wrong in (
        {"tokens": tokens.astype(np.int32), "seq_lens": seq_lens},
        {"token": tokens, "seq_lens": seq_lens},
        {"tokens": tokens},
    ):
        with pytest.raises(ValueError, match=r".+"):
            session(wrong)


@pytest.mark.parametrize("precision", TARGETS)
def test_lengths_are_clamped_and_padding_is_ignored(fraud_files: Exported, precision: str) -> None:
    session = tflite.open_session(fraud_files.paths[precision])
    tokens = np.arange(15).reshape(3, 5)
    outside = {"tokens": tokens, "seq_lens": np.array([0, -1, 2**40])}
    inside = {"tokens": tokens, "seq_lens": np.array([1, 1, 5])}
    first, second = session(outside)["probability"], session(inside)["probability"]
    np.testing.assert_array_equal(first, second)
    other = {**inside, "tokens": tokens.copy()}
    other["tokens"][:2, 1:] = 99
    np.testing.assert_allclose(session(other)["probability"], second, atol=1e-6)


def test_a_token_or_a_length_past_the_table_is_an_error_and_the_next_call_works(
    fraud_files: Exported,
) -> None:
    session = tflite.open_session(fraud_files.paths["fp32"])
    good = {"tokens": np.arange(4).reshape(1, 4), "seq_lens": np.array([4])}
    expected = session(good)["probability"]
    for tokens in (np.full((1, 4), 256), np.zeros((1, 17), np.int64)):
        with pytest.raises(RuntimeError, match="gather index out of bounds"):
            session({"tokens": tokens, "seq_lens": np.array([4])})
    np.testing.assert_array_equal(session(good)["probability"], expected)


def operators(path: Path) -> tuple[set[str], set[bytes]]:
    """Names of the built-in operators, and of any others."""
    from tensorflow.lite.python import schema_py_generated as schema

    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(path.read_bytes()))
    codes = [model.operatorCodes[op.opcodeIndex] for op in model.subgraphs[0].operators]
    assert len(model.subgraphs) == 1
    names = {code: name for name, code in vars(schema.BuiltinOperator).items()}
    builtin = {names[max(code.builtinCode, code.deprecatedBuiltinCode)] for code in codes}
    return builtin, {code.customCode for code in codes if code.customCode}


@pytest.mark.parametrize("precision", TARGETS)
def test_every_operator_is_built_in(files: Exported, precision: str) -> None:
    builtin, custom = operators(files.paths[precision])
    assert not custom
    assert "CUSTOM" not in builtin
    # Not spelt out as a product: that is slow, and cannot be quantised.
    assert "FULLY_CONNECTED" in builtin
    assert ("GELU" in builtin) == (files.source.spec.name == "vit")


class OneLineModel(tf.Module):  # type: ignore[misc]
    """A TensorFlow model in one line."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self._call = call

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": self._call(inputs["x"])}


def tensorflow_source(call: Any) -> Source:
    signature = ModelSignature(
        (TensorSpec("x", Datatype.FP32, (-1,)),), (TensorSpec("y", Datatype.FP32, (-1,)),), 8
    )
    spec = ModelSpec("own", lambda model, batch: signature)
    model = OneLineModel(call)
    return Source(Framework.TENSORFLOW, model, spec, signature, lambda inputs: {}, 0, ())


@pytest.mark.parametrize(
    ("call", "operator"),
    [
        (lambda x: tf.math.erf(x), r"tf\.Erf"),
        (lambda x: tf.math.digamma(tf.math.erf(x)), r"tf\.Digamma, tf\.Erf"),
    ],
)
def test_an_operator_without_a_kernel_is_named(tmp_path: Path, call: Any, operator: str) -> None:
    with pytest.raises(Unsupported, match=f"no built-in kernel for {operator};") as caught:
        tflite.export(tensorflow_source(call), tmp_path / "model.tflite", ExportTarget())
    assert "\n" not in str(caught.value)
    assert exit_code(caught.value) == 4
    assert not list(tmp_path.iterdir())


def test_exporting_says_nothing_and_leaves_one_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tflite.export(tensorflow_source(lambda x: x + 1), tmp_path / "model.tflite", ExportTarget())
    session = tflite.open_session(tmp_path / "model.tflite")
    result = session({"x": np.zeros((3, 2), np.float32)})
    np.testing.assert_array_equal(result["y"], np.ones((3, 2), np.float32))
    assert capfd.readouterr() == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["model.tflite"]


def test_a_damaged_file_is_one_line(fraud_files: Exported, tmp_path: Path) -> None:
    content = fraud_files.paths["fp32"].read_bytes()
    path = tmp_path / "model.tflite"
    for damaged in (b"", b"TFL3", content[: len(content) // 2], b"\0" * 4096):
        path.write_bytes(damaged)
        said = r"'model\.tflite' (is not a|does not load: it is damaged)"
        with pytest.raises(IntegrityError, match=said) as caught:
            tflite.open_session(path)
        assert "\n" not in str(caught.value)
        assert exit_code(caught.value) == 5


def test_half_precision_arithmetic_is_refused(fraud_files: Exported) -> None:
    with pytest.raises(Unsupported, match="cannot be converted to tflite in bf16"):
        check_route(fraud_files.source, FORMATS.builtin["tflite"], ExportTarget("bf16"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            '<unknown>:0: error: loc(fused[callsite(fused["Transpose:", "transpose_3@f_18115"] at '
            "fused[x])]): 'tfl.transpose' op failed to verify that operand 0 is tensor<f32>\n",
            r"\('tfl\.transpose' failed to verify that operand 0 is\)",
        ),
        (
            '<unknown>:0: error: loc(fused["a"]): see current operation: %0',
            r"\(it gives no reason\)",
        ),
        (
            "a.py:1: error: 'tf.Mul' op is neither a custom op nor a flex op\nDetails:\n"
            '\ttf.Mul(tensor<?x4xcomplex<f32>>) -> (tensor<?x4xcomplex<f32>>) : {device = ""}\n',
            r"no built-in kernel for tf\.Mul of complex64; compute in float32",
        ),
    ],
)
def test_a_refusal_shows_nothing_of_the_converters_inside(text: str, reason: str) -> None:
    said = str(tflite._refusal(RuntimeError(text)))
    assert re.search(reason, said), said
    assert not re.search(r"loc\(|fused|<unknown>|tensor<|%0", said), said
    assert "use --format savedmodel" in said


class Ordered(nn.Module):
    """Differences and quotients whose first operand is a number or a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 4.0)[:, None] * torch.ones(3, 50))

    def forward(self, x: Tensor) -> Tensor:
        turned = x.transpose(1, 2)
        operands = turned, torch.sigmoid(turned), torch.relu(turned)
        differences = [first - y for y in operands for first in (1, self.weight)]
        quotients = [first / (y + 2) for y in operands for first in (1, self.weight)]
        return torch.stack([*differences, *quotients, turned.reciprocal()], 1)


def turning() -> Source:
    signature = ModelSignature(
        inputs=(TensorSpec("x", Datatype.FP32, (50, 3)),),
        outputs=(TensorSpec("y", Datatype.FP32, (13, 3, 50)),),
        max_batch_size=4,
    )
    return source(Ordered().eval(), ModelSpec("turning", lambda module, most: signature), signature)


def test_operands_keep_their_order_beside_a_transposition(tmp_path: Path) -> None:
    module = Ordered().eval()
    x = torch.rand(2, 50, 3, generator=torch.Generator().manual_seed(0)) + 0.5
    tflite.export(turning(), tmp_path / "model.tflite", ExportTarget())
    found = tflite.open_session(tmp_path / "model.tflite")({"x": x.numpy()})["y"]
    with torch.no_grad():
        expected = module(x).numpy()
    wrong = [i for i in range(13) if not np.allclose(found[:, i], expected[:, i], atol=1e-5)]
    assert wrong == []
