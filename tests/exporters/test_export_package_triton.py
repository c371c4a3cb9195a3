"""``modelport package --for triton``, and warm-up requests for Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from modelport.exporters.formats.registry import FORMATS
from modelport.exporters.loaded_model import Source
from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.requests import triton_warmup
from modelport.exporters.requests.random_inputs import draw
from modelport.exporters.sources import pytorch
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.repository import config, manifest
from modelport.gateway.repository.scan import scan
from modelport.gateway.settings import ModelControlMode, Settings
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec
from tests import models
from tests.gateway.models.managers import host
from tests.packages import PLAIN, X, packaged, put, put_torchscript, refused, run
from tests.torch_subjects import SumAndDifference


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "repository"


def test_triton_gets_configurations_versions_and_the_files_they_name(
    repository: Path, tmp_path: Path
) -> None:
    def change(wanted: Any) -> None:
        wanted.output[0].label_filename = "labels.txt"
        wanted.platform = wanted.backend = ""  # known by its file name

    put(repository, "m", "onnx", change=change)
    put(repository, "m", "onnx", version=2, change=change)
    put(repository, "saved", "savedmodel")
    put(repository, "lite", "tflite")
    (repository / "m" / "labels.txt").write_text("cat\ndog\n")
    (repository / "m" / "notes.txt").write_text("mine")
    (repository / "m" / "draft").mkdir()
    result = run(repository, "triton", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "left out   'lite' is tflite" in result.output
    found = scan([tmp_path / "out"])
    assert list(found) == ["m", "saved"]
    assert sorted(path.name for path in (tmp_path / "out" / "m").iterdir()) == [
        "2",
        "config.pbtxt",
        "labels.txt",
    ]
    assert manifest.verify(found["m"].versions[2].path)
    written = config.parse(found["m"].config_text or "")
    assert (written.platform, written.backend) == ("onnxruntime_onnx", "onnxruntime")
    assert not written.instance_group  # which device is Triton's to say
    assert config.signature(written) == PLAIN


@pytest.mark.parametrize("name", ["../secret.txt", "/etc/hostname", "no.txt"])
def test_a_configuration_cannot_pull_in_files_from_elsewhere(
    name: str, repository: Path, tmp_path: Path
) -> None:
    def change(wanted: Any) -> None:
        wanted.output[0].label_filename = name

    put(repository, "m", "onnx", change=change)
    (repository / "secret.txt").write_text("secret")
    refused(run(repository, "triton", tmp_path / "out"), 5, name)
    assert not (tmp_path / "out").exists()


def pair(*names: str, datatype: Datatype = Datatype.FP32) -> ModelSignature:
    """A signature with two inputs and two outputs."""
    specs = [TensorSpec(name, datatype, (4,)) for name in names]
    return ModelSignature(tuple(specs[:2]), tuple(specs[2:]), 8)


def test_triton_finds_the_tensors_of_a_torchscript_model_by_order_and_name(
    repository: Path, tmp_path: Path
) -> None:
    put_torchscript(repository, "named", SumAndDifference(), pair("a", "b", "sum", "difference"))
    put_torchscript(
        repository, "indexed", SumAndDifference(), pair("in__0", "in__1", "out__0", "out__1")
    )
    put_torchscript(
        repository, "free", SumAndDifference(), pair("a/x", "b x", "1__2", "difference")
    )
    result = run(repository, "triton", tmp_path / "out")
    assert result.exit_code == 0
    assert list(scan([tmp_path / "out"])) == ["free", "indexed", "named"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("a", "b", "out__1", "out__0"), ("out__1, out__0", "rename")),
        (("in__1 ", "in__0", "s", "d"), ()),
        (("in:__1", "in:__0", "s", "d"), ("in:__1, in:__0", "rename")),
    ],
)
def test_names_that_triton_would_take_for_other_positions_are_refused(
    names: tuple[str, ...], words: tuple[str, ...], repository: Path, tmp_path: Path
) -> None:
    folder = put_torchscript(repository, "m", SumAndDifference(), pair(*names))
    result = run(folder, "triton", tmp_path / "out")
    if words:
        refused(result, 4, *words)
    else:
        assert result.exit_code == 0, result.output


def test_a_configuration_whose_inputs_are_in_another_order_than_forwards_is_refused(
    repository: Path, tmp_path: Path
) -> None:
    folder = put_torchscript(repository, "m", SumAndDifference(), pair("a", "b", "s", "d"))
    row = FORMATS.builtin["torchscript"].platform
    swapped = config.build("m", row, pair("b", "a", "s", "d"))
    (folder.parent / config.FILENAME).write_text(config.to_text(swapped))
    refused(run(folder, "triton", tmp_path / "out"), 4, "b, a", "a, b", "mix them up")


def test_datatypes_that_tritons_pytorch_backend_has_not_are_refused(
    repository: Path, tmp_path: Path
) -> None:
    signature = pair("a", "b", "s", "d", datatype=Datatype.UINT16)
    folder = put(repository, "m", "torchscript", signature)
    refused(run(folder, "triton", tmp_path / "out"), 4, "'a' of 'm' is UINT16", "--format onnx")


def fraud_source(module: nn.Module) -> Source:
    spec: ModelSpec = module.modelport_spec
    return pytorch.source(module, spec, spec.signature(module, 8))


def test_warm_up_requests_are_seeded_and_of_the_largest_batch_and_one(fraud: nn.Module) -> None:
    signature = fraud_source(fraud).signature
    first, second = triton_warmup.requests(signature, draw, 7)
    assert (first["tokens"].shape, first["seq_lens"].shape) == ((8, 12), (8,))
    assert (second["tokens"].shape, second["seq_lens"].shape) == ((1, 6), (1,))
    again = triton_warmup.requests(signature, draw, 7)
    assert all(
        (a == b).all()
        for x, y in zip(again, [first, second], strict=True)
        for a, b in zip(x.values(), y.values(), strict=True)
    )
    other = triton_warmup.requests(signature, draw, 8)[0]
    assert (other["tokens"] != first["tokens"]).any()
    unbatched = ModelSignature((X,), PLAIN.outputs, 0)
    assert [r["x"].shape for r in triton_warmup.requests(unbatched, draw, 0)] == [(4,)]


def test_warm_up_files_are_one_element_each_in_the_shape_of_the_wire(
    fraud: nn.Module, tmp_path: Path
) -> None:
    signature = fraud_source(fraud).signature
    wanted = config.build("fraud", FORMATS.builtin["onnx"].platform, signature)
    requests = triton_warmup.requests(signature, draw, 0)
    triton_warmup.add(wanted, tmp_path, requests)
    assert [(w.name, w.batch_size, w.count) for w in wanted.model_warmup] == [
        ("batch_8", 8, 1),
        ("batch_1", 1, 1),
    ]
    for warmup, request in zip(wanted.model_warmup, requests, strict=True):
        lens, tokens = warmup.inputs["seq_lens"], warmup.inputs["tokens"]
        assert list(lens.dims) == [1]  # the model itself takes a scalar per element
        assert list(tokens.dims) == [request["tokens"].shape[1]]
        data = (tmp_path / "warmup" / tokens.input_data_file).read_bytes()
        assert data == request["tokens"][0].astype("<i8").tobytes()
        data = (tmp_path / "warmup" / lens.input_data_file).read_bytes()
        assert np.frombuffer(data, "<i8") == request["seq_lens"][0]
    assert len(list((tmp_path / "warmup").iterdir())) == 4


def test_warm_up_of_a_model_without_batches_and_with_odd_names_is_whole(tmp_path: Path) -> None:
    odd = TensorSpec("serving/x:0 ../y", Datatype.FP32, (2, "rows", 3), reshape=(-1, 6))
    signature = ModelSignature((odd,), PLAIN.outputs, 0, {"rows": Axis("rows", 1, 5)})
    wanted = config.build("m", FORMATS.builtin["onnx"].platform, signature)
    triton_warmup.add(wanted, tmp_path, triton_warmup.requests(signature, draw, 0))
    (warmup,) = wanted.model_warmup
    assert (warmup.batch_size, list(warmup.inputs[odd.name].dims)) == (1, [2, 5, 3])
    (file,) = (tmp_path / "warmup").iterdir()
    assert file.stat().st_size == 2 * 5 * 3 * 4


async def test_the_gateway_and_a_package_take_a_model_with_warm_up_as_it_is(
    repository: Path, tmp_path: Path
) -> None:
    folder = put(repository, "m", "onnx")
    models.multiply(folder / "model.onnx")
    (folder / manifest.CERTIFICATE).unlink()  # a placeholder
    manifest.write(folder)
    wanted = config.build("m", FORMATS.builtin["onnx"].platform, PLAIN)
    triton_warmup.add(wanted, folder.parent, triton_warmup.requests(PLAIN, draw, 0))
    (folder.parent / config.FILENAME).write_text(config.to_text(wanted))
    for place in (repository, packaged(repository, "triton", tmp_path / "out")):
        entry = scan([place])["m"]
        assert (entry.problem, list(entry.versions)) == ("", [1])
        read = config.complete(config.parse(entry.config_text or ""), "m")
        assert read.model_warmup == wanted.model_warmup
        manager = ModelManager(Settings((place,), ModelControlMode.EXPLICIT), make_host=host)
        await manager.start()
        await manager.load("m")
        assert manager.get("m").signature == PLAIN
        for warmup in read.model_warmup:
            file = entry.path / "warmup" / warmup.inputs["x"].input_data_file
            assert file.stat().st_size == 4 * 4
        file.unlink()
        await manager.unload("m")
        with pytest.raises(InvalidArgument, match=f"'warmup/{file.name}' of input 'x'"):
            await manager.load("m")
        await manager.stop()
