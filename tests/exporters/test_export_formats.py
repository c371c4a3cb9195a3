"""One command, several formats: all of them proven and published, or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from modelport.exporters.cli.export import export
from modelport.exporters.formats import tflite as tflite_format
from modelport.exporters.formats.registry import ALL, FORMATS, find_format
from modelport.exporters.models.fraud import FraudTransformer
from modelport.exporters.sources.torch_eager import inference_mode
from modelport.gateway.errors import Unsupported
from modelport.gateway.repository import config, manifest
from tests.commands import failed

FRAUD_KWARGS: dict[str, Any] = {
    "vocab_size": 32,
    "d_model": 16,
    "nhead": 2,
    "num_layers": 1,
    "dim_feedforward": 24,
    "max_positions": 12,
}

#: Largest error that was measured on trained weights, with room for another machine's arithmetic.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    module = FraudTransformer(**FRAUD_KWARGS)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    path = tmp_path_factory.mktemp("checkpoint") / "fraud.pt"
    torch.save({"model_state_dict": module.state_dict(), "model_kwargs": FRAUD_KWARGS}, path)
    return path


def run(checkpoint: Path, repository: Path, *arguments: str) -> Result:
    fixed = ["--model", "fraud", "--repository", str(repository), "--samples", "60"]
    return CliRunner().invoke(export, [str(checkpoint), *fixed, *arguments])


@pytest.fixture(scope="module")
def published(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that every format was published into with one command."""
    repository = tmp_path_factory.mktemp("all") / "repository"
    extra = ("--format", "pt2", "--max-batch-size", "16")
    done = run(checkpoint, repository, "--format", "all", *extra)
    assert done.exit_code == 0, done.stderr
    return repository


FIVE = (*ALL, "pt2")


def test_every_format_gets_its_own_model_with_its_own_platform_and_file(published: Path) -> None:
    assert {path.name for path in published.iterdir()} == {f"fraud-{name}" for name in FIVE}
    for name in FIVE:
        model, platform = published / f"fraud-{name}", find_format(name).platform
        written = config.parse((model / "config.pbtxt").read_text())
        assert (written.platform, written.backend) == (platform.platform, platform.backend)
        assert (model / "1" / platform.default_filename).exists()
        assert manifest.verify(model / "1")


def test_inputs_and_outputs_are_the_same_in_every_format(published: Path) -> None:
    signatures = [
        config.signature(config.parse((published / f"fraud-{name}" / "config.pbtxt").read_text()))
        for name in FIVE
    ]
    assert all(signature == signatures[0] for signature in signatures)
    for name in FIVE:
        row = find_format(name)
        session = row.open_session(published / f"fraud-{name}/1" / row.platform.default_filename)
        assert sorted(session.inputs) == ["seq_lens", "tokens"]
        assert list(session.outputs) == ["probability"]


@pytest.mark.parametrize("name", FIVE)
def test_a_certificate_holds_error_sizes_decisions_seconds_and_memory(
    published: Path, name: str
) -> None:
    content = json.loads((published / f"fraud-{name}" / "1" / "certificate.json").read_text())
    parity = content["parity"]
    assert parity["outputs"]["probability"]["max_abs_error"] < TOLERANCE
    assert parity["outputs"]["probability"]["mean_abs_error"] < TOLERANCE / 2
    assert parity["decision"]["agreement"] == 1.0
    assert parity["batch_sizes"] == [1, 2, 4, 8, 16]  # four: edges beside each other
    assert {1, 6, 12} <= set(parity["axis_sizes"]["sequence"])
    assert content["artifact"]["size_bytes"] > 10_000
    assert content["resources"]["export_seconds"] > 0
    assert content["resources"]["peak_memory_bytes"] > 10_000_000


def test_warm_up_samples_are_there_for_triton_and_for_tensorflow_serving(published: Path) -> None:
    for name in FIVE:
        model = published / f"fraud-{name}"
        written = config.parse((model / "config.pbtxt").read_text())
        assert written.model_warmup
        for warmup in written.model_warmup:
            for name_, tensor in warmup.inputs.items():
                assert (model / "warmup" / tensor.input_data_file).stat().st_size, name_
    extra = published / "fraud-savedmodel" / "1" / "model.savedmodel" / "assets.extra"
    assert (extra / "tf_serving_warmup_requests").stat().st_size
    assert "assets.extra" in (published / "fraud-savedmodel/1/certificate.json").read_text()


def test_the_four_artifacts_answer_alike(published: Path, checkpoint: Path) -> None:
    rng = np.random.default_rng(3)
    inputs = {"tokens": rng.integers(0, 32, (5, 9)), "seq_lens": rng.integers(1, 10, 5)}
    module = FraudTransformer(**FRAUD_KWARGS)
    module.load_state_dict(torch.load(checkpoint, weights_only=True)["model_state_dict"])
    with inference_mode(module):
        expected = module(*(torch.from_numpy(array) for array in inputs.values())).numpy()
    for name in FIVE:
        row = find_format(name)
        session = row.open_session(published / f"fraud-{name}/1" / row.platform.default_filename)
        np.testing.assert_allclose(session(inputs)["probability"], expected, atol=TOLERANCE)


def test_a_template_names_the_models(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ("--format", "torchscript", "--dtype", "fp16", "--name", "card")
    template = ("--name-template", "{name}_{format}_{precision}")
    assert run(checkpoint, tmp_path / "r", *arguments, *template).exit_code == 0
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["card_torchscript_fp16"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--name-template", "{name}"), 2, "gives two formats the same name; put"),
        (("--name-template", "{nam}-{format}"), 2, "is invalid ('nam'); it may hold {name}"),
        (("--name-template", "{}-{format}"), 2, "is invalid"),
        (("--name-template", "{name"), 2, "is invalid"),
        (("--name-template", "{name}/{format}"), 2, "is not a model name"),
        (("--lora", "."), 2, "--lora needs a Hugging Face folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_argument_is_one_line_and_publishes_nothing(
    checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    formats = ("--format", "onnx", "--format", "torchscript")
    assert said in failed(run(checkpoint, tmp_path / "r", *formats, *arguments), code)
    assert not (tmp_path / "r").exists()


def test_one_format_that_fails_leaves_the_others_unpublished(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise Unsupported("no kernel")

    monkeypatch.setattr(tflite_format, "export", refuse)
    formats = ("--format", "torchscript", "--format", "tflite")
    assert "no kernel" in failed(run(checkpoint, tmp_path / "r", *formats), 4)
    assert not (tmp_path / "r").exists()


@pytest.mark.thorough
def test_a_module_of_torch_goes_to_every_format_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "portless.py").write_text("from torch.nn import Linear as Net\n")
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "net.pt")
    monkeypatch.syspath_prepend(tmp_path)
    kwargs = '{"in_features": 3, "out_features": 2}'
    arguments = [str(tmp_path / "net.pt"), "--model", "portless:Net", "--model-kwargs", kwargs]
    repository = ["--repository", str(tmp_path / "r")]
    done = CliRunner().invoke(export, [*arguments, *repository, "--format", "all"])
    assert done.exit_code == 0, done.output
    assert len(list((tmp_path / "r").iterdir())) == 4


@pytest.mark.thorough
def test_several_formats_and_an_output_folder_lie_side_by_side(
    checkpoint: Path, tmp_path: Path
) -> None:
    formats = ("--format", "onnx", "--format", "torchscript", "-o", str(tmp_path / "out"))
    assert run(checkpoint, tmp_path / "r", *formats).exit_code == 0
    found = {path.relative_to(tmp_path / "out").as_posix() for path in tmp_path.rglob("out/*/*")}
    assert found == {
        "onnx/model.onnx",
        "onnx/certificate.json",
        "torchscript/model.pt",
        "torchscript/certificate.json",
    }
    assert not (tmp_path / "r").exists()


def test_every_format_names_a_platform_and_its_routes_exist() -> None:
    for row in FORMATS.builtin.values():
        assert row.platform.format == row.name
        assert all("fp32" in route.precisions for route in row.routes.values())
