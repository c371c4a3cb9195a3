"""``modelport export`` end to end: what it publishes, what it refuses, and how it says so."""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from click.testing import Result
from torch import nn

import modelport.exporters.formats.onnx as formats_onnx
from modelport.exporters.artifact_destination import Destination
from modelport.exporters.formats import torchscript
from modelport.exporters.formats.registry import find_format
from modelport.exporters.loaded_model import Source
from modelport.gateway.cli.errors import Failure
from modelport.gateway.errors import Unsupported
from modelport.gateway.repository import config, manifest
from modelport.gateway.repository.manifest import sha256_of
from tests.commands import failed

Invoke = Callable[..., Result]
Python = Callable[..., subprocess.CompletedProcess[str]]
Snapshot = Callable[[Path], dict[str, str]]

EXPORT = torchscript.export


def export_one_weight_wrong(source: Source, *rest: Any) -> None:
    spoiled = copy.deepcopy(source.model)
    with torch.no_grad():
        spoiled.get_parameter("head.weight")[0, 0] += 0.05
    EXPORT(replace(source, model=spoiled), *rest)


def test_an_export_publishes_a_proven_version_that_any_runtime_opens(
    invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path
) -> None:
    result = invoke(fraud_checkpoint, "--max-batch-size", "4", "--seed", "3")
    assert result.exit_code == 0, result.stderr
    for label in ("model", "version", "path", "size", "max error", "agreement", "seconds"):
        assert f"\n{label}" in f"\n{result.stdout}"
    model = tmp_path / "repository" / "fraud"
    version = model / "1"
    assert {path.name for path in version.iterdir()} == {
        "model.onnx",
        "certificate.json",
        "samples.json",
        "manifest.json",
    }
    assert manifest.verify(version)
    session = onnxruntime.InferenceSession(version / "model.onnx")
    assert [value.name for value in session.get_inputs()] == ["tokens", "seq_lens"]

    signature = config.signature(config.parse((model / config.FILENAME).read_text()))
    tokens, seq_lens = signature.inputs
    assert (tokens.dims, tokens.minimum, tokens.maximum) == (("sequence",), 0, 31)
    assert (seq_lens.dims, seq_lens.reshape, seq_lens.maximum) == ((1,), (), "sequence")
    assert signature.axes["sequence"].maximum == 12
    assert signature.max_batch_size == 4
    check_certificate(json.loads((version / "certificate.json").read_text()), version)

    line = failed(invoke(fraud_checkpoint, "--max-batch-size", "4", "--model-version", "1"), 2)
    assert "version 1 of 'fraud' is published" in line
    assert "--max-batch-size" in failed(invoke(fraud_checkpoint, "--max-batch-size", "5"), 2)


def check_certificate(certificate: dict[str, Any], version: Path) -> None:
    artifact, parity = certificate["artifact"], certificate["parity"]
    assert artifact["opset"] == 20
    assert artifact["dtype"] == "fp32"
    assert artifact["files"] == {"model.onnx": {"sha256": sha256_of(version / "model.onnx")}}
    assert certificate["checkpoint"]["file"] == "fraud.pt"
    assert certificate["checkpoint"]["sha256"] == sha256_of(version.parents[2] / "fraud.pt")
    assert certificate["model"]["model_kwargs"]["nhead"] == 2
    assert parity["seed"] == 3
    assert parity["samples"] >= 40
    assert parity["edge_samples"] > 0
    assert parity["batch_sizes"] == [1, 2, 4]
    assert {1, 6, 12} <= set(parity["axis_sizes"]["sequence"])
    assert parity["tolerance"] == {"atol": 5e-6, "rtol": 1e-5}
    errors = parity["outputs"]["probability"]
    assert 0 <= errors["mean_abs_error"] <= errors["max_abs_error"] < 5e-6
    assert parity["decision"]["agreement"] == 1.0
    assert {"modelport", "python", "numpy", "torch", "onnx", "onnxruntime"} <= set(
        certificate["versions"]
    )
    assert certificate["hardware"]["cpu"]
    assert certificate["hardware"]["cores"] >= 1
    assert certificate["created"].endswith("+00:00")
    text = json.dumps(certificate)
    assert str(version.parents[2]) not in text, "a path was shipped"


def test_one_perturbed_weight_exits_3_and_leaves_the_repository_as_it_was(
    invoke: Invoke,
    vit_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: Snapshot,
) -> None:
    arguments = ("--model-kwargs", '{"num_heads": 2}', "--format", "torchscript")
    repository = tmp_path / "repository"
    assert invoke(vit_checkpoint, *arguments, model="vit").exit_code == 0
    before = snapshot(repository)
    monkeypatch.setattr(torchscript, "export", export_one_weight_wrong)
    assert "'logits' differs" in failed(invoke(vit_checkpoint, *arguments, model="vit"), 3)
    assert snapshot(repository) == before


@pytest.mark.parametrize("output", ["out", pytest.param("out/net.pt", marks=pytest.mark.thorough)])
def test_an_output_is_written_instead_of_published_and_replaced_when_repeated(
    invoke: Invoke, vit_checkpoint: Path, tmp_path: Path, output: str
) -> None:
    arguments = ("--model-kwargs", '{"num_heads": 2}', "--format", "torchscript")
    for _ in range(2):
        result = invoke(vit_checkpoint, *arguments, "-o", str(tmp_path / output), model="vit")
        assert result.exit_code == 0, result.stderr
    name = "net.pt" if output.endswith(".pt") else "model.pt"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {name, "certificate.json"}
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert certificate["artifact"]["files"][name]["sha256"] == sha256_of(tmp_path / "out" / name)
    assert not (tmp_path / "repository").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--opset", "7"), 4, "--opset 7 is not supported; use 18 to "),
        (("--dtype", "int8"), 4, "--dtype 'int8' is not supported; use fp32 or fp16 or bf16"),
        (("--format", "coreml"), 4, "--format 'coreml' is not supported; use onnx, "),
        (("--model", "resnet"), 2, "--model 'resnet' is not registered; use fraud, vit"),
        (("--model", "vit"), 2, "is not a ViT's"),
        (("--model", "absent.module:factory"), 2, "importing 'absent.module' failed"),
        (("--model", "code/nets.py:Net"), 2, "name its module, as in --model 'nets:Net', from"),
        (("--model", "json:absent"), 2, "has no callable 'absent'"),
        (("--model-kwargs", "{"), 2, "--model-kwargs is not JSON"),
        (("--model-kwargs", "[1]"), 2, "--model-kwargs must be a JSON object"),
        (("--model-kwargs", '{"depth": 3}'), 2, "correct --model-kwargs"),
        (("--model-kwargs", '{"d_model": 32}'), 2, "wrong shapes: embedding.weight"),
        (("--name", "../up"), 2, "--name '../up' is not a model name"),
        (("--model-version", "0"), 2, "--model-version '0' is not a version"),
        (("--name-template", ""), 2, "is not a model name"),
        (("--name-template", "{name:>1000000}"), 2, "is invalid ('name'); it may hold {name}"),
        (("--name-template", "{name!r}"), 2, "is invalid ('name')"),
        (("--output-name", "score"), 2, "names its own outputs; omit --output-name"),
        (("--output", "net.tflite"), 2, "'net.tflite' is not a file of onnx; end it in .onnx"),
        (("--format", "all", "--output", "net.onnx"), 2, "several formats; give a folder"),
        (("--max-batch-size", "-1"), 2, "--max-batch-size"),
        (("--max-batch-size", "2147483648"), 2, "--max-batch-size"),
        (("--samples", "-1"), 2, "--samples"),
        (("--atol", "nan"), 2, "--atol must be a finite number"),
        (("--rtol", "inf"), 2, "--rtol must be a finite number"),
        (("--wrong",), 2, "No such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_done_is_one_line_and_an_exit_code(
    invoke: Invoke,
    fraud_checkpoint: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    assert said in failed(invoke(fraud_checkpoint, *arguments), code)
    assert not (tmp_path / "repository").exists()


def test_a_bad_checkpoint_exits_5_and_a_missing_one_2(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "bad.pt").write_bytes(b"PK\x03\x04 and then nothing")
    assert "truncated or damaged" in failed(invoke(tmp_path / "bad.pt"), 5)
    assert "does not exist" in failed(invoke(tmp_path / "absent.pt"), 2)
    (tmp_path / "folder").mkdir()
    assert "neither config.json" in failed(invoke(tmp_path / "folder"), 2)


def test_an_unexpected_exception_is_one_line_too(
    invoke: Invoke, fraud_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(formats_onnx, "export", broken)
    assert "unexpected ZeroDivisionError: a bug" in failed(invoke(fraud_checkpoint), 1)


def test_a_saved_model_that_was_written_before_is_the_file_and_not_a_folder_for_it(
    tmp_path: Path,
) -> None:
    output = tmp_path / "net.savedmodel"
    row = find_format("savedmodel")
    destination = Destination(tmp_path / "repository", output=output)
    assert destination.file_of(row, several=False) == (tmp_path, output.name)
    output.mkdir()
    assert destination.file_of(row, several=False) == (output, "model.savedmodel")
    (output / "saved_model.pb").touch()
    assert destination.file_of(row, several=False) == (tmp_path, output.name)


def test_a_users_module_that_exits_when_imported_is_a_usage_error(
    invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script_that_exits.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = failed(invoke(fraud_checkpoint, model="script_that_exits:Net"), 2)
    assert "importing 'script_that_exits' failed: SystemExit" in said


@pytest.mark.parametrize("swallowed", [False, True], ids=["as it is", "by a library"])
def test_an_interrupt_is_one_line_even_where_a_library_makes_another_error_of_it(
    invoke: Invoke,
    fraud_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    swallowed: bool,
) -> None:
    def interrupted(*_: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            if not swallowed:
                raise
            raise Unsupported("torch.onnx cannot export this model: half imported")  # noqa: B904

    monkeypatch.setattr(formats_onnx, "export", interrupted)
    assert failed(invoke(fraud_checkpoint), 130) == "modelport: error: interrupted"
    assert not (tmp_path / "repository").exists()


@pytest.mark.thorough
def test_a_full_disk_is_one_line_and_leaves_nothing_behind(
    invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be cut short
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        result = invoke(fraud_checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot write to" in failed(result, 2)
    assert not (tmp_path / "repository").exists()


def test_a_repository_that_is_a_file_is_a_usage_error(
    invoke: Invoke, fraud_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "repository").write_text("")
    assert "cannot write to" in failed(invoke(fraud_checkpoint), 2)


USER_MODEL = """
import torch
from torch import nn
from modelport.exporters.model_spec import ModelSpec
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec


def signature(module, max_batch_size):
    return ModelSignature(
        inputs=(TensorSpec("features", Datatype.FP32, ("steps", module.width)),),
        outputs=(
            TensorSpec("score", Datatype.FP32, (1,)),
            TensorSpec("hidden", Datatype.FP32, ("steps", module.width)),
        ),
        max_batch_size=max_batch_size,
        axes={"steps": Axis("steps", 1, 7)},
    )


class Scorer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, width)

    def forward(self, features):
        hidden = self.linear(features)
        return hidden.mean(dim=(1, 2)).unsqueeze(1), hidden


class Baked(Scorer):
    def forward(self, features):
        hidden = self.linear(features) * features.shape[1].__int__()
        return hidden.mean(dim=(1, 2)).unsqueeze(1), hidden


def make(width=3):
    module = Scorer(width)
    module.modelport_spec = ModelSpec("scorer", signature)
    return module


def baked(width=3):
    return Baked(width)


baked.modelport_spec = ModelSpec("baked", signature)
undeclared = Scorer
"""


@pytest.fixture
def user_project(tmp_path: Path) -> Path:
    """A folder with a user's own model and checkpoint in it."""
    (tmp_path / "my_models.py").write_text(USER_MODEL)
    layer = nn.Linear(3, 3)
    state = {f"linear.{key}": value for key, value in layer.state_dict().items()}
    torch.save(state, tmp_path / "mine.pt")
    return tmp_path


def test_a_users_own_factory_is_exported_from_the_working_directory(
    python: Python, user_project: Path
) -> None:
    """In a process that imports nothing for it that serves the web."""
    code = """
import atexit, runpy, sys
web = ("torch", "fastapi", "starlette", "uvicorn", "aiohttp", "flask")
atexit.register(lambda: print([name for name in web if name in sys.modules]))
runpy.run_module("modelport", run_name="__main__", alter_sys=True)
"""
    options = ("--model", "my_models:make", "--format", "torchscript", "--samples", "30", "--quiet")
    result = python("-c", code, "export", "mine.pt", *options)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.endswith("['torch']\n")
    assert manifest.verify(user_project / "model_repository" / "scorer" / "1")


def test_a_users_model_that_bakes_a_dimension_in_exits_3(
    invoke: Invoke, user_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(user_project)
    monkeypatch.syspath_prepend(user_project)
    result = invoke(user_project / "mine.pt", model="my_models:baked")
    assert "a dimension is baked in" in failed(result, 3)
    assert not (user_project / "repository").exists()


def test_the_error_for_a_model_without_a_declaration_explains_how_to_declare(
    invoke: Invoke, user_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(user_project)
    monkeypatch.syspath_prepend(user_project)
    result = invoke(
        user_project / "mine.pt",
        "--model-kwargs",
        '{"width": 3}',
        model="my_models:undeclared",
    )
    said = failed(result, 2)
    assert "does not run on features [2, 3]: " in said
    assert "--input" in said
    assert "modelport_spec" in said


def test_the_command_line_alone_imports_no_torch_and_no_runtime(python: Python) -> None:
    heavy = ["torch", "onnx", "onnxruntime", "tensorflow", "fastapi", "uvicorn", "numpy", "grpc"]
    code = "import sys, modelport.exporters.cli.export; "
    code += f"print([m for m in {heavy} if m in sys.modules])"
    assert python("-c", code).stdout.strip() == "[]"


def test_help_and_a_missing_argument_work_through_the_module(python: Python) -> None:
    assert "CHECKPOINT" in python("-m", "modelport", "export", "--help").stdout
    assert "Missing argument 'CHECKPOINT'" in failed(python("-m", "modelport", "export"), 2)


def test_a_message_quotes_what_a_file_says_in_one_printable_line() -> None:
    said = Failure(ValueError(f"type 'x\n\x1b[31m\ud800{'é' * 10**6}' is unknown; use another"))
    assert said.message.startswith("type 'x \\x1b[31m\\ud800éé")
    assert said.message.endswith("éé' is unknown; use another")
    assert said.message.isprintable()
    assert len(said.message) < 5000


def test_a_reader_that_stops_reading_gets_no_error_message() -> None:
    """The shell's ``modelport export --help | head -1``."""
    for arguments in (["export", "--help"], ["--help"]):
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "modelport", *arguments]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=100)
        os.close(writing)
        assert (done.returncode, done.stderr) == (1, b"")


def test_a_version_published_again_is_refused_with_what_differs(
    invoke: Callable[..., Result], fraud: nn.Module, fraud_checkpoint: Path
) -> None:
    arguments = ("--format", "torchscript", "--model-version", "1")
    assert invoke(fraud_checkpoint, *arguments).exit_code == 0
    again = invoke(fraud_checkpoint, *arguments)
    assert again.exit_code == 2
    assert "it has the same checkpoint, options and versions" in again.stderr
    content = torch.load(fraud_checkpoint, weights_only=True)
    content["model_state_dict"]["head.bias"] += 1
    torch.save(content, fraud_checkpoint)
    other = invoke(fraud_checkpoint, *arguments, "--dtype", "fp16")
    assert other.exit_code == 2
    (line,) = other.stderr.splitlines()
    assert "version 1 of 'fraud' is published and never overwritten" in line
    assert "artifact.dtype is fp32 there and fp16 here" in line
    assert re.search(r"checkpoint.sha256 is [0-9a-f]{12}… there and [0-9a-f]{12}… here", line)


def test_misspelled_names_are_answered_with_the_likeliest(
    invoke: Invoke, fraud_checkpoint: Path
) -> None:
    wrong = invoke(fraud_checkpoint, "--format", "onxx")
    said = failed(wrong, 4)
    assert "'onxx' is not supported; use onnx, " in said
    assert said.endswith("; did you mean 'onnx'?")
    wrong = invoke(fraud_checkpoint, model="frued")
    said = failed(wrong, 2)
    assert "'frued' is not registered; use fraud, " in said
    assert said.endswith("; did you mean 'fraud'?")
