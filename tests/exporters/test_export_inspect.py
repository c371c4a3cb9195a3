"""``modelport inspect`` says what is in an artifact of any format, and runs none of it."""

from __future__ import annotations

import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import FORMATS
from modelport.exporters.runtime.output_capture import quiet
from modelport.gateway.types import ModelSignature
from tests.inspected import refused, run, show, survives_damage
from tests.pickle_bomb import PickleBomb
from tests.torch_subjects import SumAndDifference, fp32, rewritten, subject

FRAUD_INPUTS = [
    {"name": "tokens", "datatype": "INT64", "shape": ["batch", "sequence"]},
    {"name": "seq_lens", "datatype": "INT64", "shape": ["batch"]},
]


@pytest.fixture(scope="module")
def files() -> dict[tuple[str, str], bytes]:
    """Artifacts, by format and datatype."""
    return {}


@pytest.fixture
def exported(
    fraud: nn.Module, tmp_path: Path, files: dict[tuple[str, str], bytes]
) -> Callable[..., Path]:
    """The fraud model in a format, exported once."""

    def make(name: str, dtype: str = "fp32") -> Path:
        path = tmp_path / FORMATS.builtin[name].platform.default_filename
        if (name, dtype) not in files:
            FORMATS.builtin[name].export(subject(fraud), path, ExportTarget(dtype=dtype, opset=20))
            files[name, dtype] = path.read_bytes()
        path.write_bytes(files[name, dtype])
        return path

    return make


@pytest.mark.parametrize("name", ["onnx", "torchscript", "pt2"])
def test_an_exported_model_shows_signature_weights_and_operators(
    fraud: nn.Module, exported: Callable[..., Path], name: str
) -> None:
    path = exported(name)
    shown = show(path)
    assert shown["format"] == name
    assert shown["inputs"] == FRAUD_INPUTS
    assert shown["outputs"] == [{"name": "probability", "datatype": "FP32", "shape": ["batch"]}]
    assert [axis["name"] for axis in shown["dynamic_axes"]] == ["batch", "sequence"]
    assert shown["size_bytes"] == path.stat().st_size
    parameters = sum(p.numel() for p in fraud.parameters())
    assert parameters <= shown["weights"]["FP32"] <= parameters * 1.02
    assert shown["parameters"] == sum(shown["weights"].values())
    assert shown["quantized_share"] == 0
    linear = {"onnx": "Sigmoid", "torchscript": "aten::sigmoid", "pt2": "aten.sigmoid.default"}
    assert shown["operators"][linear[name]] == 1
    assert shown["opset"] == {"onnx": 20, "torchscript": None, "pt2": shown["opset"]}[name]
    assert shown["format_version"]
    if name != "onnx":
        assert shown["dynamic_axes"][0] == {"name": "batch", "minimum": 1, "maximum": 8}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["torchscript", "pt2"])
def test_half_precision_shows_in_the_histogram(exported: Callable[..., Path], name: str) -> None:
    shown = show(exported(name, "bf16"))
    assert shown["weights"]["BF16"] > 10 * shown["weights"].get("FP32", 0)
    assert shown["outputs"][0]["datatype"] == "FP32"


# -- ONNX


def onnx_model(nodes: list[Any], weights: list[Any], shape: list[Any]) -> Any:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="hand")


def test_onnx_counts_subgraphs_quantised_weights_and_domains(tmp_path: Path) -> None:
    inner = helper.make_graph(
        [helper.make_node("Mul", ["w", "scale"], ["i"])],
        "then",
        [],
        [helper.make_tensor_value_info("i", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ones(4, np.float32), "scale")],
    )
    nodes = [
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array(True))),
        helper.make_node("If", ["c"], ["i"], then_branch=inner, else_branch=inner),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"]),
        helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain="com.microsoft"),
    ]
    weights = [
        numpy_helper.from_array(np.ones((4, 22), np.int8), "q"),
        numpy_helper.from_array(np.array(0.1, np.float32), "s"),
        numpy_helper.from_array(np.array(0, np.int8), "z"),
        numpy_helper.from_array(np.arange(5), "indexes"),
    ]
    path = tmp_path / "model.onnx"
    onnx.save(onnx_model(nodes, weights, ["rows", 4]), path)
    shown = show(path)
    assert shown["operators"] == {
        "Mul": 2,
        "If": 1,
        "DequantizeLinear": 1,
        "com.microsoft.FusedMatMul": 1,
    }
    assert shown["weights"] == {"INT8": 89, "FP32": 9}
    assert shown["quantized_share"] == 89 / 98
    assert (shown["opset"], shown["format_version"], shown["producer"]) == (20, "IR 10", "hand")
    assert shown["dynamic_axes"] == [{"name": "rows", "minimum": None, "maximum": None}]
    assert shown["outputs"] == [{"name": "y", "datatype": "FP32", "shape": None}]


def with_external_data(folder: Path) -> Path:
    path = folder / "model.onnx"
    model = onnx_model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [numpy_helper.from_array(np.ones((4, 900), np.float32), "w")],
        [2, 4],
    )
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data")
    return path


def test_external_data_counts_and_stays_in_its_folder(tmp_path: Path) -> None:
    path = with_external_data(tmp_path)
    shown = show(path)
    data = tmp_path / "model.onnx.data"
    assert shown["external_data"] == [{"file": "model.onnx.data", "size_bytes": 14400}]
    assert shown["size_bytes"] == path.stat().st_size + 14400
    assert shown["weights"] == {"FP32": 3600}
    data.rename(tmp_path / "elsewhere")
    refused(path, 5, "'model.onnx.data', which is missing")
    model = onnx.load(path, load_external_data=False)
    entries = {e.key: e for e in model.graph.initializer[0].external_data}
    outside = f"{tmp_path.name}-outside"  # no other test has it
    entries["location"].value = f"../{outside}"
    (tmp_path.parent / outside).write_bytes(b"secret")
    path.write_bytes(model.SerializeToString())
    refused(path, 5, "outside its folder")


# -- TorchScript


class LinearBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Stranger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([LinearBlock(), LinearBlock()])
        self.again = self.blocks[0]

    def forward(self, x: torch.Tensor, times: int) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        for _ in range(times):
            x = torch.tanh(x)
        return self.again(x), torch.sigmoid(x)


def scripted(module: nn.Module, path: Path) -> Path:
    with quiet():
        torch.jit.script(module.eval()).save(path)
    return path


def test_another_hands_torchscript_shows_its_arguments_and_every_call(tmp_path: Path) -> None:
    shown = show(scripted(Stranger(), tmp_path / "model.pt"))
    assert [tensor["name"] for tensor in shown["inputs"]] == ["x", "times"]
    assert [tensor["name"] for tensor in shown["outputs"]] == ["output_0", "output_1"]
    assert {tensor["shape"] for tensor in shown["inputs"]} == {None}
    called = {name: shown["operators"][f"aten::{name}"] for name in ("linear", "tanh", "sigmoid")}
    assert called == {"linear": 6, "tanh": 1, "sigmoid": 1}
    assert shown["weights"] == {"FP32": 80}
    assert shown["notes"] == ["datatypes and sizes are not stored: modelport did not write it"]


def test_quantised_torchscript_is_counted_in_bytes_that_are_narrow(tmp_path: Path) -> None:
    with quiet():
        module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)).eval())
    shown = show(scripted(module, tmp_path / "model.pt"))
    assert shown["weights"] == {"INT8": 64, "FP32": 8}
    assert shown["operators"]["quantized::linear_dynamic"] >= 1


def test_reading_torchscript_runs_neither_its_code_nor_its_pickles(
    exported: Callable[..., Path], tmp_path: Path
) -> None:
    path, marker = exported("torchscript"), tmp_path / "ran"
    for record in ("data.pkl", "constants.pkl"):
        evil = pickle.dumps(PickleBomb(marker), protocol=2)
        memo = b"\x80\x02Nr\xff\xff\xff\xff."  # of 2^32 places
        for content in (evil, memo):
            assert run(rewritten(path, {record: content})).exit_code in (0, 5)
    assert not marker.exists()


# -- .pt2


def test_another_hands_pt2_shows_what_torch_stores(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    dims = {0: torch.export.Dim("rows", min=2, max=64)}
    with quiet():
        program = torch.export.export(
            SumAndDifference(), (torch.ones(3, 2),) * 2, dynamic_shapes=(dims, dims)
        )
        torch.export.save(program, path)
    shown = show(path)
    assert [tensor["name"] for tensor in shown["inputs"]] == ["a", "b"]
    (axis,) = shown["dynamic_axes"]
    assert (axis["minimum"], axis["maximum"]) == (2, 64)
    assert shown["inputs"][0]["shape"] == [axis["name"], 2]
    assert [tensor["datatype"] for tensor in shown["outputs"]] == ["FP32", "FP32"]
    assert shown["operators"] == {"aten.add.Tensor": 1, "aten.sub.Tensor": 1}
    assert shown["producer"] == f"torch {torch.__version__}"
    assert (shown["parameters"], shown["quantized_share"]) == (0, 0)


def test_a_compiled_model_says_what_cannot_be_listed(
    exported: Callable[..., Path], tmp_path: Path
) -> None:
    program, path = exported("pt2"), tmp_path / "compiled.pt2"
    kept = ("extra/", "archive_", "byteorder")
    with zipfile.ZipFile(program) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            if name.partition("/")[2].startswith(kept):
                new.writestr(name, old.read(name))
        folder = "archive/data/aotinductor/model/x.wrapper"
        new.writestr(f"{folder}.so", b"\x7fELF")
        new.writestr(f"{folder}_metadata.json", '{"AOTI_PLATFORM": "linux", "AOTI_CPU_ISA": "A"}')
    shown = show(path)
    assert (shown["format"], shown["inputs"]) == ("aoti", FRAUD_INPUTS)
    assert (shown["operators"], shown["weights"], shown["parameters"]) == (None, None, None)
    assert shown["notes"] == [
        "operators and weights are compiled: they cannot be listed",
        "compiled for linux, A",
    ]


# -- What is refused


def test_a_path_that_is_not_an_artifact_is_a_usage_error(tmp_path: Path) -> None:
    checkpoint, text = tmp_path / "weights.pt", tmp_path / "notes.txt"
    torch.save({"w": torch.ones(2)}, checkpoint)
    text.write_text("hello")
    (tmp_path / "empty" / "1").mkdir(parents=True)
    refused(tmp_path / "nowhere", 2, "does not exist")
    refused(text, 2, "'notes.txt' is not an artifact; use a file that ends in .onnx")
    refused(checkpoint, 2, "is a checkpoint")
    refused(tmp_path, 2, "is neither a SavedModel nor a model's folder")
    refused(tmp_path / "empty", 2, "holds no artifact")
    assert run(tmp_path / ("a" * 300)).exit_code == 2


@pytest.mark.parametrize("name", ["onnx", "torchscript", "pt2"])
def test_damage_is_one_line_wherever_it_is(
    exported: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    if name == "onnx":
        path = tmp_path / "model.onnx"
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        weight = numpy_helper.from_array(np.ones((4, 9), np.float32), "w")
        onnx.save(onnx_model([node], [weight], ["rows", 4]), path)
    else:
        path = exported(name)
    survives_damage(path, path)


@pytest.mark.parametrize(
    ("module", "filename", "extra"),
    [("onnx", "model.onnx", "torch"), ("ai_edge_litert", "model.tflite", "litert")],
)
def test_a_library_that_is_not_installed_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, filename: str, extra: str
) -> None:
    (tmp_path / filename).write_bytes(b"anything")
    reader = Path(filename).suffix.removeprefix(".")
    monkeypatch.delitem(sys.modules, f"modelport.exporters.inspection.{reader}", raising=False)
    for name in [n for n in sys.modules if n.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    refused(tmp_path / filename, 4, f"pip install '.[{extra}]'")


def test_names_cannot_give_orders_to_the_terminal(tmp_path: Path) -> None:
    declared = ModelSignature(
        (fp32("a\x1b]0;owned\x07", 3), fp32("[red]b[/red]\n", 3)), (fp32("s", 3), fp32("d", 3)), 8
    )
    path = tmp_path / "model.pt"
    FORMATS.builtin["torchscript"].export(
        subject(SumAndDifference(), declared), path, ExportTarget()
    )
    shown = run(path).stdout
    assert "a\\x1b]0;owned\\x07" in shown
    assert "[red]b[/red]\\n" in shown
    assert "\x1b" not in shown


IMPORTS = """
import sys
from modelport.exporters.cli.inspect import inspect
heavy = ("torch", "tensorflow", "onnx", "onnxruntime", "ai_edge_litert")
print([name for name in heavy if name in sys.modules])
for path in sys.argv[1:]:
    inspect([path, "--json"], standalone_mode=False)
print([name for name in heavy if name in sys.modules])
"""


def test_torchs_archives_are_read_without_torch(
    exported: Callable[..., Path], python: Callable[..., CompletedProcess[str]]
) -> None:
    result = python("-c", IMPORTS, str(exported("torchscript")), str(exported("pt2")))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("[]", "[]")
