"""Optimised and quantised graphs are held to the proof, and say what they changed and gained."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from modelport.exporters.cli.export import export
from modelport.exporters.cli.verify import verify
from modelport.exporters.formats import onnx as onnx_format
from modelport.exporters.model_spec import Decision, ModelSpec
from modelport.exporters.models.fraud import FraudTransformer
from modelport.exporters.models.vit import VisionTransformer
from modelport.exporters.optimization import calibration, onnx_graph, transformer_fusion
from modelport.exporters.optimization.options import OptimizationOptions
from modelport.exporters.proof import verify as verification
from modelport.exporters.requests import sample_requests
from modelport.exporters.requests.random_inputs import sampler
from modelport.exporters.sources.pytorch import source
from modelport.gateway.errors import IntegrityError, UsageError
from modelport.gateway.recording.recorder import RequestRecorder
from modelport.gateway.types import Datatype, ModelSignature, Tensor, TensorSpec
from modelport.loadtests.compare import artifacts
from modelport.loadtests.compare.plan import Variant
from tests.exporters.conftest import FRAUD_KWARGS, VIT_KWARGS
from tests.gateway.recording.test_recorded_traffic import ALL, put_tensors
from tests.pickle_bomb import PickleBomb
from tests.thorough import sampled

Invoke = Callable[..., Result]

VIT = ("--model-kwargs", '{"num_heads": 2}')


SIGNATURE = ModelSignature(
    (TensorSpec("image", Datatype.FP32, (3, 8, 8)),),
    (TensorSpec("logits", Datatype.FP32, (5,)),),
    max_batch_size=8,
)


class ConvolutionalNet(nn.Module):
    """Convolutions with batch normalisation, as in a detector's first stages."""

    modelport_spec = ModelSpec("cnn", lambda *_: SIGNATURE, decision=Decision("logits"))

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 5)),
        )

    def forward(self, image: torch.Tensor) -> Any:
        return self.body(image)


CNN = "tests.exporters.test_export_optimize:ConvolutionalNet"


OUTLIER_SIGNATURE = ModelSignature(
    (TensorSpec("x", Datatype.FP32, (64,)),),
    (TensorSpec("logits", Datatype.FP32, (8,)),),
    max_batch_size=8,
)


class OutlierNet(nn.Linear):
    """One large weight in each block, the same for every class: 4 bits leave nothing of the others,
    which decide."""

    modelport_spec = ModelSpec(
        "outliers", lambda *_: OUTLIER_SIGNATURE, decision=Decision("logits")
    )

    def __init__(self) -> None:
        super().__init__(64, 8, bias=False)
        torch.manual_seed(0)
        nn.init.normal_(self.weight)
        with torch.no_grad():
            self.weight[:, ::16] = 1000.0


OUTLIERS = "tests.exporters.test_export_optimize:OutlierNet"


@pytest.fixture
def cnn(tmp_path: Path) -> Path:
    torch.save(ConvolutionalNet().state_dict(), tmp_path / "cnn.pt")
    return tmp_path / "cnn.pt"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    rows = np.random.default_rng(3).standard_normal((32, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "images.npz", image=rows)
    return tmp_path / "images.npz"


def published(done: Result, tmp_path: Path, name: str) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The graph and the certificate that an export, which succeeded, has published."""
    assert done.exit_code == 0, done.stderr
    version = tmp_path / "repository" / name / "1"
    document: dict[str, Any] = json.loads((version / "certificate.json").read_text())
    return onnx.load(version / "model.onnx"), document


def operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


def failed(result: Result, code: int, tmp_path: Path) -> str:
    assert result.exit_code == code, result.stderr or result.stdout
    assert not (tmp_path / "repository").exists()
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture(scope="module")
def first_level(tmp_path_factory: pytest.TempPathFactory) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The graph and the certificate of a vision transformer at the first level."""
    folder = tmp_path_factory.mktemp("first_level")
    torch.manual_seed(0)
    torch.save(VisionTransformer(**VIT_KWARGS).state_dict(), folder / "vit.pth")
    options = (*VIT, "--model", "vit", "--format", "onnx", "--optimize", "O1", "--samples", "40")
    place = ("--repository", str(folder / "repository"))
    return published(
        CliRunner().invoke(export, [str(folder / "vit.pth"), *options, *place]), folder, "vit"
    )


def test_a_certificate_with_a_nonsensical_optimisation_is_an_integrity_error(
    first_level: tuple[onnx.ModelProto, dict[str, Any]],
) -> None:
    _, document = first_level
    good = document["optimization"]
    for bad in (
        3,
        "O1",
        [],
        {},
        {**good, "speedup": [1]},
        {**good, "speedup": [{**good["speedup"][0], "shapes": {"image": [None]}}]},
        {**good, "fused": {"Gelu": "many"}},
        {**good, "operators_before": None},
    ):
        with pytest.raises(IntegrityError, match="does not describe the proof"):
            verification._claim({**document, "optimization": bad})


def test_models_without_a_batch_dimension_are_measured_as_they_are(
    invoke: Invoke, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    declared = ("--model-kwargs", '{"in_features": 4, "out_features": 2}')
    whole = ("--max-batch-size", "0", "--input", "x:FP32[nodes=2..9,4]", "--name", "net")
    done = invoke(
        tmp_path / "net.pt", *declared, *whole, "--optimize", "O1", model="torch.nn:Linear"
    )
    _, document = published(done, tmp_path, "net")
    (one,) = document["optimization"]["speedup"]
    assert (one["batch"], one["shapes"]) == (0, {"x": [5, 4]})


# -- --optimize -----------------------------------------------------------------------------------


def test_the_first_level_keeps_to_operators_of_onnx_itself(
    first_level: tuple[onnx.ModelProto, dict[str, Any]],
) -> None:
    model, document = first_level
    assert {entry.domain for entry in model.opset_import} == {""}
    assert document["artifact"]["optimize"] == "O1"
    assert document["optimization"]["portable"] is True
    assert document["optimization"]["fused"] == {}
    assert document["parity"]["bounds"] is None


def test_the_second_level_fuses_and_keeps_every_value_and_verify_shows_it(
    invoke: Invoke, vit_checkpoint: Path, tmp_path: Path
) -> None:
    done = invoke(vit_checkpoint, *VIT, "--optimize", "O2", model="vit")
    model, document = published(done, tmp_path, "vit")
    found = document["optimization"]
    assert {"SkipLayerNormalization", "BiasGelu"} <= operators(model)
    assert found["fused"].keys() >= {"SkipLayerNormalization", "BiasGelu"}
    assert found["operators_after"] < found["operators_before"]
    assert found["portable"] is False
    assert (found["num_heads"], found["hidden_size"]) == (2, 16)
    assert document["parity"]["bounds"] is None, "fusions keep values: the tolerance holds"
    assert [one["shapes"]["image"][0] for one in found["speedup"]] == [1, 8]
    assert all(one["low"] <= one["ratio"] <= one["high"] for one in found["speedup"])
    compared = artifacts.published(tmp_path / "repository" / "vit")
    assert compared.variant == Variant("onnx", "fp32", "O2")
    assert compared.certificate.speedup == found["speedup"][1]["ratio"]
    assert compared.certificate.speedup_rows == 8
    again = _verify(tmp_path / "repository" / "vit", vit_checkpoint)
    assert "SkipLayerNormalization" in again
    assert f"{found['speedup'][1]['ratio']:.2f}x" in again
    assert "on image [8, 1, 8, 8]" in again


def _verify(model: Path, checkpoint: Path) -> str:
    done = CliRunner().invoke(verify, [str(model), "--checkpoint", str(checkpoint), "--quiet"])
    assert done.exit_code == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_the_third_level_approximates_gelu_and_is_held_to_decisions(
    invoke: Invoke, vit_checkpoint: Path, tmp_path: Path
) -> None:
    done = invoke(vit_checkpoint, *VIT, "--optimize", "O3", model="vit")
    model, document = published(done, tmp_path, "vit")
    assert "FastGelu" in operators(model)
    assert document["optimization"]["approximate"] is True
    assert document["parity"]["bounds"] == {"agreement": 0.995, "relative_error": 0.01}
    _verify(tmp_path / "repository" / "vit", vit_checkpoint)


def test_a_model_without_gelu_keeps_every_value_at_the_third_level(
    invoke: Invoke, cnn: Path, tmp_path: Path
) -> None:
    done = invoke(cnn, "--optimize", "O3", model=CNN)
    _, document = published(done, tmp_path, "cnn")
    assert document["optimization"]["approximate"] is False
    assert document["parity"]["bounds"] is None


@pytest.mark.thorough
def test_fp16_is_made_after_the_fusions(
    invoke: Invoke, vit_checkpoint: Path, tmp_path: Path
) -> None:
    arguments = (*VIT, "--optimize", "O2", "--dtype", "fp16", "--min-agreement", "0.9")
    done = invoke(vit_checkpoint, *arguments, model="vit")
    model, document = published(done, tmp_path, "vit")
    kinds = {tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) == 2}
    assert kinds == {onnx.TensorProto.FLOAT16}
    assert "SkipLayerNormalization" in operators(model)
    found = document["optimization"]
    assert found["size_bytes_after"] < 0.75 * found["size_bytes_before"]


@pytest.mark.parametrize("level", sampled(("O1", "O2"), "O2"))
def test_a_fusion_that_changes_the_answer_is_refused(
    invoke: Invoke,
    vit_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    level: str,
) -> None:
    """The optimiser loses a bias."""
    honest = transformer_fusion.optimizer.optimize_model

    def careless(*arguments: Any, **options: Any) -> Any:
        optimized = honest(*arguments, **options)
        for tensor in optimized.model.graph.initializer:
            if len(tensor.dims) == 1 and tensor.data_type == onnx.TensorProto.FLOAT:
                nothing = np.zeros(tuple(tensor.dims), np.float32)
                tensor.CopyFrom(onnx.numpy_helper.from_array(nothing, tensor.name))
                break
        return optimized

    monkeypatch.setattr(transformer_fusion.optimizer, "optimize_model", careless)
    done = invoke(vit_checkpoint, *VIT, "--optimize", level, model="vit")
    said = failed(done, 3, tmp_path)
    assert "output 'logits' differs" in said
    assert f"try it without --optimize {level}" in said


def test_fusions_that_fail_for_an_architecture_give_way_to_general_ones(
    vit: nn.Module, invoke: Invoke, vit_checkpoint: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """GPT-2's fusions expect nodes that torch.onnx no longer writes."""
    gpt = transformer_fusion.Transformer("gpt2", 2, 16)
    monkeypatch.setattr(transformer_fusion, "describe", lambda source: gpt)
    honest = transformer_fusion._with_fusions_of

    def strict(draft: Path, transformer: Any) -> Any:
        if transformer.model_type == "gpt2":
            raise IndexError("list index out of range")
        return honest(draft, transformer)

    monkeypatch.setattr(transformer_fusion, "_with_fusions_of", strict)
    done = invoke(vit_checkpoint, *VIT, "--optimize", "O2", model="vit")
    _, document = published(done, tmp_path, "vit")
    assert document["optimization"]["model_type"] == "bert"


def test_the_architecture_and_its_sizes_come_from_the_configuration() -> None:
    class Configuration:
        def to_dict(self) -> dict[str, Any]:
            return {"model_type": "gpt2", "n_head": 4, "n_embd": 64}

    inner, outer = nn.Linear(1, 1), nn.Sequential()
    inner.config = Configuration()  # type: ignore[assignment]
    outer.append(inner)
    spec = ConvolutionalNet().modelport_spec
    subject = source(ConvolutionalNet(), spec, SIGNATURE)
    assert transformer_fusion.describe(subject) == transformer_fusion.Transformer("bert", 0, 0)
    configured = dataclasses.replace(subject, model=outer)
    assert transformer_fusion.describe(configured) == transformer_fusion.Transformer("gpt2", 4, 64)


# -- int8 with calibration data -------------------------------------------------------------------


@pytest.mark.thorough
def test_calibration_data_makes_int8_static_and_the_certificate_names_it(
    invoke: Invoke, cnn: Path, images: Path, tmp_path: Path
) -> None:
    arguments = ("--quantize", "int8", "--calibrate", str(images), "--min-agreement", "0.5")
    for number, method in enumerate(("minmax", "entropy", "percentile")):
        chosen = ("--calibration-method", method, "--name", f"cnn-{method}")
        channels = ("--no-per-channel",) if number else ()
        done = invoke(cnn, *arguments, *chosen, *channels, model=CNN)
        model, document = published(done, tmp_path, f"cnn-{method}")
        assert {"QuantizeLinear", "DequantizeLinear"} <= operators(model)
        assert not {"DynamicQuantizeLinear"} & operators(model)
        scheme = document["artifact"]["quantization"]
        assert scheme["scheme"] == "static"
        assert scheme["calibration_method"] == method
        assert scheme["calibration_rows"] == 32
        assert [one["file"] for one in scheme["calibration"]] == ["images.npz"]
        assert scheme["per_channel"] is (number == 0)
        assert _has_scale_per_channel(model) is (number == 0)
        assert document["optimization"]["speedup"]


def _has_scale_per_channel(model: onnx.ModelProto) -> bool:
    return any(
        tensor.name.endswith("_scale") and tensor.dims and tensor.dims[0] > 1
        for tensor in model.graph.initializer
    )


def test_calibration_data_of_another_range_wrecks_the_decisions_and_is_refused(
    invoke: Invoke, cnn: Path, tmp_path: Path
) -> None:
    """All activations of real inputs lie outside of the ranges that dim images give."""
    dark = np.random.default_rng(3).standard_normal((32, 3, 8, 8)).astype(np.float32) * 1e-4
    np.savez(tmp_path / "dark.npz", image=dark)
    arguments = ("--quantize", "int8", "--calibrate", str(tmp_path / "dark.npz"))
    said = failed(invoke(cnn, *arguments, model=CNN), 3, tmp_path)
    assert "decisions agree on" in said
    assert "below 97.00%" in said
    assert "give inputs there that cover the model's" in said


def test_all_forms_of_calibration_data_give_the_same_inputs(fraud: Any, tmp_path: Path) -> None:
    spec = fraud.modelport_spec
    signature = spec.signature(fraud, 8)
    subject = source(fraud, spec, signature, model_kwargs=FRAUD_KWARGS)
    rng = np.random.default_rng(0)
    rows = [sampler(spec)(signature, 1, {"sequence": 6}, rng) for _ in range(9)]
    whole = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    np.savez(tmp_path / "rows.npz", **whole)
    lines = [
        {
            "inputs": [
                {
                    "name": spec.name,
                    "datatype": spec.datatype.value,
                    "shape": list(row[spec.name].shape),
                    "data": row[spec.name].tolist(),
                }
                for spec in signature.inputs
            ]
        }
        for row in rows
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    document = sample_requests.record(signature, rows, subject.reference, 0.0, 0.0)
    sample_requests.write(tmp_path / "rows.json", document)
    recorder = RequestRecorder(ALL._replace(target=tmp_path / "records"))
    for row in rows:
        given = [Tensor(spec.name, spec.datatype, row[spec.name]) for spec in signature.inputs]
        put_tensors(recorder, "fraud", given, [])
    recorder.close()
    for name in ("rows.npz", "rows.jsonl", "rows.json", "records"):
        data = calibration.read([tmp_path / name], subject)
        assert data.rows == 9
        for key, expected in whole.items():
            found = np.concatenate([batch[key] for batch in data.batches])
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("absent.npz", None, "is not a readable .npz file: No such file"),
        ("noise.npz", b"PK\x03\x04 noise", "is not a readable .npz file"),
        ("names.npz", {"picture": (9, 3, 8, 8)}, "has no input 'image'; it has picture"),
        ("shape.npz", {"image": (9, 1, 8, 8)}, "'image' is [9, 1, 8, 8], the signature says [N"),
        ("kind.npz", np.zeros((9, 3, 8, 8)), "'image' is float64, the signature says FP32"),
        ("nan.npz", np.full((9, 3, 8, 8), np.nan, np.float32), "values that are not finite"),
        ("few.npz", {"image": (7, 3, 8, 8)}, "7 rows of inputs are too few"),
        ("none.npz", {"image": (0, 3, 8, 8)}, "0 rows of inputs are too few"),
        ("empty.jsonl", b"", "0 rows of inputs are too few"),
        ("text.jsonl", b"image\n", "is not a file of requests (Expecting value"),
        ("deep.jsonl", b"[" * 100_000, "is not a file of requests"),
        ("list.jsonl", b"[1]\n", "is not a file of requests"),
        ("other.jsonl", b'{"inputs": []}\n', "request 1 has no input 'image'; it has none"),
        (
            "size.jsonl",
            b'{"inputs": [{"name": "image", "datatype": "FP32", "shape": [1000000000, 3, 8, 8], '
            b'"data": [1]}]}',
            "'image' has 1 values, but its shape needs [1000000000, 3, 8, 8]",
        ),
        (
            "typed.jsonl",
            b'{"inputs": [{"name": "image", "datatype": "INT64", "shape": [1], "data": [1]}]}',
            "'image' is INT64, the signature says FP32",
        ),
        (
            "words.json",
            b'{"data": [{"image": {"content": ["a"], "shape": [1]}}]}',
            "the signature says FP32",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value[-6:] else "",
)
def test_calibration_data_that_does_not_fit_is_named(
    tmp_path: Path, name: str, content: Any, said: str
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        np.savez(path, **{key: np.zeros(shape, np.float32) for key, shape in content.items()})
    elif content is not None:
        np.savez(path, image=content)
    net = ConvolutionalNet()
    with pytest.raises(UsageError) as refused:
        calibration.read([path], source(net, net.modelport_spec, SIGNATURE))
    assert said in str(refused.value)
    assert name in str(refused.value)


def test_calibration_ids_beyond_the_vocabulary_are_named(
    invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path
) -> None:
    tokens = np.full((9, 4), 99)
    np.savez(tmp_path / "ids.npz", tokens=tokens, seq_lens=np.full(9, 4))
    arguments = ("--quantize", "int8", "--calibrate", str(tmp_path / "ids.npz"))
    said = failed(invoke(fraud_checkpoint, *arguments), 2, tmp_path)
    assert "'tokens' has values from 99 to 99, the signature says 0 to 31" in said


def test_pickled_calibration_data_is_not_executed(
    invoke: Invoke, cnn: Path, tmp_path: Path
) -> None:
    bomb = PickleBomb(tmp_path / "exploded")
    np.savez(tmp_path / "bad.npz", image=np.array([bomb], dtype=object))
    arguments = ("--quantize", "int8", "--calibrate", str(tmp_path / "bad.npz"))
    assert "is not a readable .npz" in failed(invoke(cnn, *arguments, model=CNN), 2, tmp_path)
    assert not (tmp_path / "exploded").exists()


# -- weights alone --------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["int4", "int8-weight-only"])
def test_weights_alone_are_quantised_in_blocks(
    invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    arguments = ("--quantize", kind, "--block-size", "16", "--min-agreement", "0.5")
    done = invoke(fraud_checkpoint, *arguments)
    model, document = published(done, tmp_path, "fraud")
    nodes = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    assert len(nodes) >= 8, "four matrices of each of two layers"
    bits = 4 if kind == "int4" else 8
    for node in nodes:
        given = {entry.name: entry.i for entry in node.attribute}
        assert (given["bits"], given["block_size"]) == (bits, 16)
    assert ("GatherBlockQuantized" in operators(model)) is (kind == "int4")
    assert document["artifact"]["quantization"] == {"scheme": "weight-only", "block_size": 16}
    assert document["artifact"]["opset"] == (21 if kind == "int4" else 20)
    found = document["optimization"]
    assert found["size_bytes_after"] < found["size_bytes_before"]
    _verify(tmp_path / "repository" / "fraud", fraud_checkpoint)


def test_a_model_that_does_not_tolerate_int4_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    torch.save(OutlierNet().state_dict(), tmp_path / "net.pt")
    done = invoke(tmp_path / "net.pt", "--quantize", "int4", model=OUTLIERS)
    said = failed(done, 3, tmp_path)
    assert "decisions agree on" in said
    assert "below 90.00%" in said


@pytest.mark.thorough
def test_large_weights_stay_in_a_file_beside_the_optimised_graph(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs = {**FRAUD_KWARGS, "d_model": 64, "num_layers": 1}
    module, checkpoint = FraudTransformer(**kwargs), tmp_path / "fraud.pt"
    torch.save({"model_state_dict": module.state_dict(), "model_kwargs": kwargs}, checkpoint)
    np.savez(tmp_path / "rows.npz", tokens=np.zeros((8, 4), int), seq_lens=np.full(8, 4))
    for module in (onnx_format, onnx_graph):
        monkeypatch.setattr(module, "EXTERNAL_DATA_BYTES", 1000)
    for name, arguments in {
        "fused": ("--optimize", "O2"),
        "dynamic": ("--optimize", "O1", "--quantize", "int8"),
        "static": ("--quantize", "int8", "--calibrate", str(tmp_path / "rows.npz")),
        "blocks": ("--quantize", "int4"),
    }.items():
        loose = () if name == "fused" else ("--min-agreement", "0")
        done = invoke(checkpoint, *arguments, *loose, "--name", name)
        assert done.exit_code == 0, (name, done.stderr)
        version = tmp_path / "repository" / name / "1"
        listed = json.loads((version / "certificate.json").read_text())["artifact"]["files"]
        assert {"model.onnx", "model.onnx.data"} <= listed.keys(), name
        assert {path.name for path in version.glob("*.onnx*")} <= listed.keys()
        _verify(version, checkpoint)


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--optimize", "O9"), 4, "--optimize 'O9' is not supported; use O1, O2, O3"),
        (("--optimize", "O4"), 4, "fp16 is --dtype fp16"),
        (("--optimize", "O2", "--format", "tflite"), 2, "is for ONNX only; omit --format tflite"),
        (
            ("--optimize", "O2", "--format", "onnx", "--format", "pt2"),
            2,
            "--optimize is for ONNX only; omit --format pt2",
        ),
        (("--calibrate", __file__), 2, "--calibrate has no effect without --quantize int8"),
        (
            ("--calibrate", __file__, "--quantize", "int4"),
            2,
            "--calibrate has no effect without --quantize int8",
        ),
        (
            ("--calibrate", __file__, "--quantize", "int8", "--format", "tflite"),
            2,
            "--calibrate is for ONNX only; omit --format tflite",
        ),
        (
            ("--calibration-method", "entropy", "--quantize", "int8"),
            2,
            "--calibration-method has no effect without --calibrate",
        ),
        (
            ("--calibration-method", "mean", "--quantize", "int8", "--calibrate", __file__),
            4,
            "--calibration-method 'mean' is not supported; use minmax, entropy, percentile",
        ),
        (("--per-channel",), 2, "--per-channel has no effect without --quantize int8"),
        (
            ("--block-size", "32", "--quantize", "int8"),
            2,
            "--block-size has no effect without --quantize int4 or int8-weight-only",
        ),
        (("--block-size", "48", "--quantize", "int4"), 2, "--block-size 48 is not supported"),
        (("--quantize", "int4", "--dtype", "fp16"), 2, "are mutually exclusive"),
        (
            ("--quantize", "int4", "--format", "tflite"),
            4,
            "converted to tflite in int4; use",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_without_a_meaning_are_one_line(
    invoke: Invoke,
    fraud_checkpoint: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    assert said in failed(invoke(fraud_checkpoint, *arguments), code, tmp_path)


@pytest.mark.thorough
def test_no_option_is_no_optimisation(
    invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path
) -> None:
    assert OptimizationOptions() == OptimizationOptions(None, (), None, None, None)
    done = invoke(fraud_checkpoint)
    _, document = published(done, tmp_path, "fraud")
    assert document["optimization"] is None
    assert document["artifact"]["quantization"] is None
