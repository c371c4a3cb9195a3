"""``modelport migrate torchserve``: what an archive becomes, and what is said about the rest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import Tensor, nn

from modelport.exporters.migration.archive import MAX_DOCUMENT_BYTES
from modelport.gateway.repository import config, manifest
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec
from tests.archives import folder, mar, migrate, refused, state_dict, tgz, torchscript
from tests.packages import packaged, put_torchscript

Snapshot = Callable[[Path], dict[str, str]]


class MigratedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class PictureMean(nn.Module):
    """A classifier of pictures of any size."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(3, classes)

    def forward(self, picture: Tensor) -> Tensor:
        return self.layer(picture.mean(dim=(2, 3)))


HANDLER = """
import io
import torch
import numpy as np
from ts.torch_handler.base_handler import BaseHandler
from tools import helper

class Mine(BaseHandler):
    def preprocess(self, data):
        return torch.tensor(data)

    def postprocess(self, data):
        return data.tolist()
"""
LINEAR = ("--input", "x:FP32[4]", "--output-tensor", "y:FP32[2]")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "repository"


@pytest.fixture(scope="module")
def linear() -> bytes:
    torch.manual_seed(0)
    return torchscript(MigratedLinear())


def read(repository: Path, name: str) -> Any:
    return config.parse((repository / name / config.FILENAME).read_text())


def items(result: Result, file: Path) -> dict[str, tuple[str, str]]:
    """The items of a single archive's report: state and detail."""
    document = json.loads(file.read_text())
    (archive,) = document["archives"]
    assert document["exit_code"] == result.exit_code == archive["exit_code"]
    return {item["what"]: (item["state"], item["detail"]) for item in archive["items"]}


def test_what_was_packaged_comes_back_with_the_same_bytes_and_configuration(
    invoke: Callable[..., Result],
    fraud_checkpoint: Path,
    tmp_path: Path,
    repository: Path,
    snapshot: Snapshot,
) -> None:
    exported = invoke(fraud_checkpoint, "--format", "torchscript")
    assert exported.exit_code == 0, exported.output
    archive = packaged(repository / "fraud" / "1", "torchserve", tmp_path / "fraud.mar")
    result = migrate(archive, tmp_path / "back")
    assert result.exit_code == 0, result.output
    assert snapshot(tmp_path / "back" / "fraud") == snapshot(repository / "fraud")
    assert manifest.verify(tmp_path / "back" / "fraud" / "1")


def test_labels_warm_up_and_hand_written_settings_come_back_too(
    tmp_path: Path, repository: Path, snapshot: Snapshot
) -> None:
    signature = ModelSignature(
        (TensorSpec("x", Datatype.FP32, (4,)),), (TensorSpec("y", Datatype.FP32, (2,)),), 8
    )
    version = put_torchscript(repository, "m", MigratedLinear(), signature)
    for name in ("certificate.json", "certificate.json.sig"):
        (version / name).unlink()
    manifest.write(version)
    wanted = read(repository, "m")
    wanted.output[0].label_filename = "labels.txt"
    wanted.model_warmup.add(name="w", batch_size=1).inputs["x"].input_data_file = "zeros"
    (version.parent / "labels.txt").write_text("no\nyes\n")
    (version.parent / "warmup").mkdir()
    (version.parent / "warmup" / "zeros").write_bytes(bytes(16))
    (version.parent / config.FILENAME).write_text(config.to_text(wanted))
    archive = packaged(version, "torchserve", tmp_path / "m.mar")
    assert migrate(archive, tmp_path / "back").exit_code == 0
    assert snapshot(tmp_path / "back" / "m") == snapshot(repository / "m")


def test_a_packaged_archive_whose_certificate_does_not_fit_is_refused(
    tmp_path: Path, repository: Path
) -> None:
    """``put`` writes a certificate that is none."""
    version = put_torchscript(
        repository,
        "m",
        MigratedLinear(),
        ModelSignature(
            (TensorSpec("x", Datatype.FP32, (4,)),), (TensorSpec("y", Datatype.FP32, (2,)),), 8
        ),
    )
    archive = packaged(version, "torchserve", tmp_path / "m.mar")
    refused(migrate(archive, tmp_path / "back"), 5, "certificate.json")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("make", [mar, tgz, folder])
def test_every_form_of_archive_is_read(
    make: Callable[..., Path], tmp_path: Path, repository: Path, linear: bytes
) -> None:
    suffix = {mar: ".mar", tgz: ".tar.gz", folder: ""}[make]
    archive = make(tmp_path / f"linear{suffix}", "linear", {"model.pt": linear})
    result = migrate(archive, repository, *LINEAR)
    assert result.exit_code == 0, result.output
    assert (repository / "linear" / "1" / "model.pt").read_bytes() == linear
    assert manifest.verify(repository / "linear" / "1")
    assert [path.name for path in repository.iterdir()] == ["linear"]
    assert archive.exists()
    if make is folder:
        assert (archive / "model.pt").read_bytes() == linear


def test_without_flags_the_error_names_the_arguments_and_the_flags(
    tmp_path: Path, repository: Path, linear: bytes
) -> None:
    archive = mar(tmp_path / "linear.mar", "linear", {"model.pt": linear})
    refused(
        migrate(archive, repository),
        2,
        "forward(x: Tensor) -> Tensor",
        "--input",
        "--output-tensor",
    )
    assert not repository.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--input", "a:FP32[4]", "--input", "b:FP32[4]", "--output-tensor", "y:FP32[2]"),
            "2 times",
        ),
        (
            (
                "--input",
                "x:FP32[4]",
                "--output-tensor",
                "y:FP32[2]",
                "--output-tensor",
                "z:FP32[2]",
            ),
            "returns 1",
        ),
        (("--input", "x:FLOAT[4]", "--output-tensor", "y:FP32[2]"), "--input 'x:FLOAT[4]'"),
        (("--input", "x:FP32[4]", "--output-tensor", "y"), "--output-tensor 'y'"),
        ((*LINEAR, "--name", "../x"), "--name '../x'"),
        ((*LINEAR, "--model-version", "0"), "--model-version '0'"),
        ((*LINEAR, "--compare", "http://127.0.0.1:1"), "--requests"),
        ((*LINEAR, "--gateway", "http://127.0.0.1:1"), "--compare"),
        ((*LINEAR, "--report", "/nowhere/at/all.json"), "--report"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    flags: tuple[str, ...], words: str, tmp_path: Path, repository: Path, linear: bytes
) -> None:
    archive = mar(tmp_path / "linear.mar", "linear", {"model.pt": linear})
    refused(migrate(archive, repository, *flags), 2, words)
    assert not repository.exists()


def test_settings_become_batching_and_instances(
    tmp_path: Path, repository: Path, linear: bytes
) -> None:
    archive = mar(tmp_path / "linear.mar", "linear", {"model.pt": linear})
    (tmp_path / "config.properties").write_text(
        "# old\ninference_address=http://0.0.0.0:8080\nload_models=linear.mar\nmodels={\\\n"
        '  "linear": {"1.0": {"defaultVersion": true, "marName": "linear.mar", "minWorkers": 3,\\\n'
        '  "maxWorkers": 5, "batchSize": 16, "maxBatchDelay": 20, "responseTimeout": 60}}}\n'
    )
    report = tmp_path / "report.json"
    settings = ("--config-properties", str(tmp_path / "config.properties"), "--report", str(report))
    result = migrate(archive, repository, *LINEAR, *settings)
    assert result.exit_code == 0, result.output
    told = items(result, report)
    found = read(repository, "linear")
    assert found.max_batch_size == 16
    assert list(found.dynamic_batching.preferred_batch_size) == [16]
    assert found.dynamic_batching.max_queue_delay_microseconds == 20_000
    assert [group.count for group in found.instance_group] == [3]
    assert told["batchSize 16, maxBatchDelay 20"][0] == "carried over"
    assert told["maxWorkers 5"][0] == told["responseTimeout 60 s"][0] == "noted"


def test_the_archives_own_settings_win(tmp_path: Path, repository: Path, linear: bytes) -> None:
    own = "batchSize: 4\nminWorkers: 2\npt2:\n  compile: {enable: true}\n"
    files = {"model.pt": linear, "model-config.yaml": own}
    archive = mar(tmp_path / "linear.mar", "linear", files, configFile="model-config.yaml")
    (tmp_path / "c").write_text('models={"linear":{"1.0":{"batchSize":16,"maxBatchDelay":7}}}')
    report = tmp_path / "report.json"
    result = migrate(
        archive,
        repository,
        *LINEAR,
        "--config-properties",
        str(tmp_path / "c"),
        "--report",
        str(report),
    )
    found = read(repository, "linear")
    assert list(found.dynamic_batching.preferred_batch_size) == [4]
    assert found.dynamic_batching.max_queue_delay_microseconds == 7000
    assert found.instance_group[0].count == 2
    assert items(result, report)["setting 'pt2'"][0] == "noted"


def test_no_delay_is_a_delay_too(tmp_path: Path, repository: Path, linear: bytes) -> None:
    files = {"model.pt": linear, "model-config.yaml": "batchSize: 4\nmaxBatchDelay: 0\n"}
    archive = mar(tmp_path / "linear.mar", "linear", files, configFile="model-config.yaml")
    migrate(archive, repository, *LINEAR)
    batching = read(repository, "linear").dynamic_batching
    assert list(batching.preferred_batch_size) == [4]
    assert batching.max_queue_delay_microseconds == 0


def test_dynamic_batching_is_configured_only_on_request(
    tmp_path: Path, repository: Path, linear: bytes
) -> None:
    archive = mar(tmp_path / "linear.mar", "linear", {"model.pt": linear})
    migrate(archive, repository, *LINEAR, "--max-batch-size", "8")
    found = read(repository, "linear")
    assert found.max_batch_size == 8
    assert not found.HasField("dynamic_batching")
    assert not found.instance_group


def test_an_image_classifier_takes_pictures_as_before(tmp_path: Path, repository: Path) -> None:
    names = json.dumps({"0": ["n01", "tench"], "1": "goldfish", "2": "shark"})
    files = {"model.pt": torchscript(PictureMean()), "index_to_name.json": names}
    archive = mar(tmp_path / "c.mar", "classifier", files, handler="image_classifier")
    report = tmp_path / "report.json"
    result = migrate(archive, repository, "--report", str(report))
    assert result.exit_code == 0, result.output
    told = items(result, report)
    found = read(repository, "classifier")
    signature = config.signature(found)
    assert signature.inputs == (TensorSpec("picture", Datatype.FP32, (3, 224, 224)),)
    assert signature.outputs == (TensorSpec("output", Datatype.FP32, (3,)),)
    assert (repository / "classifier" / "labels.txt").read_text() == "tench\ngoldfish\nshark\n"
    assert found.output[0].label_filename == "labels.txt"
    assert found.parameters["image.resize"].string_value == "256"
    assert found.parameters["image.size"].string_value == "224"
    assert found.parameters["image.mean"].string_value == "0.485,0.456,0.406"
    assert found.parameters["classification.output"].string_value == "logits"
    assert told["preprocess"][0] == told["handler 'image_classifier'"][0] == "carried over"


@pytest.mark.parametrize(
    "names", ['{"a": "b"}', "[]", '{"0": 1}', '{"999999999": "x"}', '{"-1": "x"}', "{}"]
)
def test_labels_of_another_form_are_left_to_a_person(
    names: str, tmp_path: Path, repository: Path
) -> None:
    files = {"model.pt": torchscript(PictureMean()), "index_to_name.json": names}
    archive = mar(tmp_path / "c.mar", "classifier", files, handler="image_classifier")
    report = tmp_path / "report.json"
    told = items(migrate(archive, repository, "--report", str(report)), report)
    assert told["index_to_name.json"][0] == "needs a person"
    assert not (repository / "classifier" / "labels.txt").exists()


def test_a_handler_is_carried_over_and_not_run(
    tmp_path: Path, repository: Path, linear: bytes
) -> None:
    trap = tmp_path / "ran"
    code = HANDLER + f"open({str(trap)!r}, 'w')\n"
    files = {"model.pt": linear, "mine.py": code, "tools.py": "x = (", "vocab.txt": "a"}
    archive = mar(tmp_path / "m.mar", "mine", files, handler="mine.py:Mine")
    report = tmp_path / "report.json"
    result = migrate(archive, repository, *LINEAR, "--report", str(report))
    told = items(result, report)
    assert result.exit_code == 0
    state, detail = told["handler 'mine.py:Mine'"]
    assert (state, "--allow-python" in detail) == ("carried over", True)
    assert told["vocab.txt"][0] == "carried over"
    handler, tools = json.loads(report.read_text())["archives"][0]["code"]
    assert handler["imports"] == ["io", "numpy", "torch", "ts"]
    assert handler["defines"] == ["Mine(BaseHandler)"]
    assert "SyntaxError" in tools["problem"]
    assert not trap.exists()
    assert "Mine(BaseHandler)" in result.output
    graph, around = read(repository, "mine-graph"), read(repository, "mine")
    assert [tensor.name for tensor in graph.input] == ["x"]
    assert (around.backend, around.max_batch_size) == ("python", 1)
    assert sorted(path.name for path in (repository / "mine" / "1").iterdir()) == [
        "handler.json", "manifest.json", "mine.py", "model.py", "tools.py", "vocab.txt",
    ]  # fmt: skip


OTHER = HANDLER.replace("BaseHandler", "ImageClassifier").replace(
    "base_handler", "image_classifier"
)
LOADS = HANDLER + "    def initialize(self, context):\n        self.model = torch.jit.load('m')\n"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "it is not in the archive"),
        ({"mine.py": "x = ("}, "it does not parse (SyntaxError)"),
        ({"mine.py": OTHER}, "it needs ts.torch_handler.image_classifier of TorchServe; derive it"),
        ({"mine.py": "def handle(data, context): ..."}, "it loads its model itself; make it a"),
        ({"mine.py": LOADS}, "its initialize() loads the model itself; call super().initialize("),
        (
            {"mine.py": HANDLER, "handler.json": "{}"},
            "'handler.json' in the archive has a reserved",
        ),
        ({"mine.py": HANDLER, "v.pkl": ""}, "'v.pkl' may run code when it is read"),
    ],
)
def test_a_handler_that_is_not_carried_over_has_a_reason_and_its_model_is_published(
    files: dict[str, str], reason: str, tmp_path: Path, repository: Path, linear: bytes
) -> None:
    content = {"model.pt": linear, **files}
    archive = mar(tmp_path / "m.mar", "mine", content, handler="mine.py")
    report = tmp_path / "report.json"
    result = migrate(archive, repository, *LINEAR, "--report", str(report))
    assert result.exit_code == 6
    state, detail = items(result, report)["handler 'mine.py'"]
    assert (state, reason in detail) == ("needs a person", True), detail
    assert [path.name for path in repository.iterdir()] == ["mine"]
    assert read(repository, "mine").input[0].name == "x"


def test_an_eager_archive_says_how_to_export_its_checkpoint(
    tmp_path: Path, repository: Path
) -> None:
    files = {"model.pt": state_dict(MigratedLinear()), "net.py": "class Net: pass\n"}
    archive = mar(tmp_path / "m.mar", "eager", files, modelFile="net.py")
    report = tmp_path / "report.json"
    result = migrate(archive, repository, "--report", str(report))
    refused(result, 4, "modelport export model.pt --model package.module:factory")
    assert json.loads(report.read_text())["archives"][0]["code"][0]["defines"] == ["Net"]
    assert not repository.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "a checkpoint, which is not opened"), (b"\x80\x04N.", "a pickle, which is not opened")],
)
def test_a_checkpoint_is_not_opened(
    content: bytes | None, words: str, tmp_path: Path, repository: Path
) -> None:
    archive = mar(tmp_path / "m.mar", "m", {"model.pt": content or state_dict(MigratedLinear())})
    refused(migrate(archive, repository), 4, words, "modelport export model.pt")


def test_an_archive_without_a_model_is_refused(tmp_path: Path, repository: Path) -> None:
    archive = mar(tmp_path / "m.mar", "m", {"h.py": "x = 1"}, serialized="", handler="h.py")
    refused(migrate(archive, repository), 4, "no serialized model")


def test_an_onnx_model_declares_itself(
    invoke: Callable[..., Result], fraud_checkpoint: Path, tmp_path: Path, repository: Path
) -> None:
    assert invoke(fraud_checkpoint).exit_code == 0
    onnx = (repository / "fraud" / "1" / "model.onnx").read_bytes()
    wanted = config.signature(read(repository, "fraud"))
    archive = mar(tmp_path / "f.mar", "fraud", {"f.onnx": onnx}, serialized="f.onnx")
    report = tmp_path / "report.json"
    result = migrate(archive, tmp_path / "new", "--max-batch-size", "8", "--report", str(report))
    assert result.exit_code == 0, result.output
    found = config.signature(read(tmp_path / "new", "fraud"))
    assert found.max_batch_size == 8
    assert [(s.name, s.datatype) for s in found.inputs] == [
        (s.name, s.datatype) for s in wanted.inputs
    ]
    assert (tmp_path / "new" / "fraud" / "1" / "model.onnx").read_bytes() == onnx


def test_torchscript_that_modelport_wrote_declares_itself_in_any_archive(
    tmp_path: Path, repository: Path
) -> None:
    signature = ModelSignature(
        (TensorSpec("x", Datatype.FP32, ("n", 4)),),
        (TensorSpec("y", Datatype.FP32, ("n", 2)),),
        8,
        {"n": Axis("n", 1, 5)},
    )
    content = (
        put_torchscript(repository, "m", MigratedLinear(), signature) / "model.pt"
    ).read_bytes()
    archive = mar(tmp_path / "m.mar", "m", {"model.pt": content})
    assert migrate(archive, tmp_path / "new").exit_code == 0
    assert config.signature(read(tmp_path / "new", "m")) == signature
    refused(migrate(archive, tmp_path / "other", *LINEAR), 2, "omit --input")


def test_a_store_is_migrated_and_a_bad_archive_costs_only_itself(
    tmp_path: Path, repository: Path, linear: bytes
) -> None:
    store, names = tmp_path / "store", json.dumps({"0": "a", "1": "b", "2": "c"})
    store.mkdir()
    files = {"model.pt": torchscript(PictureMean()), "index_to_name.json": names}
    for file, version in (("a.mar", "1.0"), ("b.mar", "2.1"), ("c.mar", "1"), ("d.mar", "7.0")):
        mar(store / file, "c", files, handler="image_classifier", modelVersion=version)
    mar(
        store / "eager.mar",
        "eager",
        {"model.pt": state_dict(MigratedLinear())},
        modelFile="model.pt",
    )
    (store / "broken.mar").write_bytes(b"PK\x03\x04 not really")
    (store / "notes.txt").write_text("not an archive")
    (tmp_path / "c").write_text(
        'load_models=a.mar\nmodels={"c":{"1.0":{"marName":"a.mar","defaultVersion":true}}}'
    )
    report = tmp_path / "report.json"
    more = ("--config-properties", str(tmp_path / "c"), "--report", str(report))
    result = migrate(store, repository, *more)
    assert result.exit_code == 5, result.output
    assert result.stderr == ""
    found = {a["archive"]: a for a in json.loads(report.read_text())["archives"]}
    assert {name: a["version"] for name, a in found.items()} == {
        "a.mar": 1,
        "b.mar": 2,
        "c.mar": 3,
        "d.mar": 7,
        "broken.mar": None,
        "eager.mar": None,
    }
    assert found["broken.mar"]["exit_code"] == 5
    assert found["eager.mar"]["exit_code"] == 4
    assert read(repository, "c").version_policy.HasField("all")
    told = {item["what"]: item["detail"] for item in found["d.mar"]["items"]}
    assert "it was 1.0; requests without a version now get 7" in told["defaultVersion"]
    assert "version 2.1" in {item["what"] for item in found["b.mar"]["items"]}
    assert "load_models" in {item["what"] for item in found["b.mar"]["items"]}
    assert all(word in result.stdout for word in ("broken.mar", "eager.mar", "published"))


def test_a_known_model_keeps_its_configuration_and_its_versions(
    tmp_path: Path, repository: Path, linear: bytes, snapshot: Snapshot
) -> None:
    archive = mar(tmp_path / "m.mar", "m", {"model.pt": linear})
    migrate(archive, repository, *LINEAR)
    before = snapshot(repository)
    refused(migrate(archive, repository, *LINEAR), 2, "version 1 of 'm'", "never overwritten")
    assert snapshot(repository) == before
    assert migrate(archive, repository, *LINEAR, "--model-version", "auto").exit_code == 0
    after = snapshot(repository)
    assert before.items() <= after.items()
    assert (repository / "m" / "2" / "model.pt").read_bytes() == linear


def test_the_name_the_old_server_used_is_the_models_name(
    tmp_path: Path, repository: Path, linear: bytes
) -> None:
    archive = mar(tmp_path / "file.mar", "inside", {"model.pt": linear})
    (tmp_path / "c").write_text("load_models=outside=file.mar\n")
    migrate(archive, repository, *LINEAR, "--config-properties", str(tmp_path / "c"))
    assert (repository / "outside" / "1" / "model.pt").is_file()


@pytest.mark.parametrize(
    "text",
    [
        "models={",
        'models={"m": 1}',
        'models={"m": {"1.0": 2}}',
        "models=[]",
        'models={"m": {"1.0": {"batchSize": "many"}}}',
        "default_workers_per_model=lots",
    ],
)
def test_settings_of_another_form_are_refused(
    text: str, tmp_path: Path, repository: Path, linear: bytes
) -> None:
    archive = mar(tmp_path / "m.mar", "m", {"model.pt": linear})
    (tmp_path / "c").write_text(text)
    refused(
        migrate(archive, repository, *LINEAR, "--config-properties", str(tmp_path / "c")),
        2,
        "--config-properties",
    )


def test_only_a_regular_file_of_a_bounded_size_is_read_as_settings(
    tmp_path: Path, repository: Path, linear: bytes
) -> None:
    archive = mar(tmp_path / "m.mar", "m", {"model.pt": linear})
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    with large.open("wb") as stream:
        stream.truncate(MAX_DOCUMENT_BYTES + 1)
    for file, words in ((pipe, "it is not a regular file"), (large, "it is larger than")):
        said = f"--config-properties '{file}' cannot be read: {words}"
        refused(migrate(archive, repository, *LINEAR, "--config-properties", str(file)), 2, said)


def test_the_report_in_markdown_holds_no_markup_of_an_archives(
    tmp_path: Path, repository: Path, linear: bytes
) -> None:
    files = {"model.pt": linear, "a|b<script>.txt": "x"}
    archive = mar(tmp_path / "m.mar", "m", files)
    report = tmp_path / "report.md"
    migrate(archive, repository, *LINEAR, "--report", str(report))
    text = report.read_text()
    assert text.startswith("# Migration")
    assert "<script>" not in text.replace("\\<", "")
    assert "a\\|b" in text


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, repository: Path, linear: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = mar(tmp_path / "m.mar", "m", {"model.pt": linear})

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", fail)
    refused(migrate(archive, repository, *LINEAR), 2, "No space left on device", "free space")
    assert not repository.exists()
