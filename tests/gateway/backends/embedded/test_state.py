"""Answers of models that keep state: they depend on their own requests only, in every runtime."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.tools import flatbuffer_utils
from onnx import TensorProto, helper

from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.gateway.backends.base import Backend
from modelport.gateway.backends.embedded import (
    independence,
    pytorch_graphs,
    tensorflow_state,
)
from modelport.gateway.backends.embedded import (
    openvino as openvino_backend,
)
from modelport.gateway.errors import Internal, Unsupported
from modelport.gateway.inference.batching import Schedulers
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.artifact_checks import saved_model_guard, tflite_guard
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import (
    NO_DEADLINE,
    Array,
    Datatype,
    InferRequest,
    InferResponse,
    ModelSignature,
    Tensor,
    TensorSpec,
    finished,
)
from tests import models
from tests.gateway.backends.embedded.runtimes import fp32, load, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),
]

CONFIG = """
input { name: "x" data_type: TYPE_FP32 dims: [1, 4] }
output { name: "y" data_type: TYPE_FP32 dims: [1, 4] }
"""
A, B = np.full((1, 4), 1, np.float32), np.full((1, 4), 50, np.float32)


# -- models that keep state -----------------------------------------------------------------------


class Buffer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.ones(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total + 0


class BufferView(Buffer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total[:, 1:] += x[:, 1:]
        return self.total + 0


class Rare(Buffer):
    """State that no synthetic request reaches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(torch.where(x > 40, x, torch.zeros_like(x)))
        return self.total + 0


class Attribute(Buffer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total = self.total + x
        return self.total


class Cache(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU(inplace=True))
        self.seen = torch.jit.Attribute([], list[torch.Tensor])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        return self.inner(torch.stack(self.seen).sum(0))


def script(module: type[torch.nn.Module]) -> Callable[[Path], str]:
    def write(version: Path) -> str:
        torch.jit.script(module().eval()).save(version / "model.pt")
        return 'platform: "pytorch_libtorch"' + CONFIG

    return write


def export(module: type[torch.nn.Module], functional: bool = False) -> Callable[[Path], str]:
    def write(version: Path) -> str:
        program = torch.export.export(module().eval(), (torch.ones(1, 4),))
        if functional:
            program = program.run_decompositions()
        program.example_inputs = None
        torch.export.save(program, version / "model.pt2")
        return 'platform: "torch_export"' + CONFIG

    return write


class Variable(tf.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.total = tf.Variable(tf.ones([1, 4]))

    def add(self, x: Any) -> dict[str, Any]:
        self.total.assign_add(x)
        return {"y": self.total + 0.0}

    def sometimes(self, x: Any) -> dict[str, Any]:
        for _ in tf.range(2):
            if tf.reduce_max(x) > 40:
                self.total.assign(self.total + x)
        return {"y": self.total + 0.0}


def function(module: Variable, method: str) -> Any:
    wanted = tf.TensorSpec([1, 4], tf.float32, "x")
    return tf.function(getattr(module, method)).get_concrete_function(wanted)


def saved(make: Callable[[], tf.Module], method: str) -> Callable[[Path], str]:
    def write(version: Path) -> str:
        module = make()
        tf.saved_model.save(
            module, str(version / "model.savedmodel"), signatures=function(module, method)
        )
        return 'platform: "tensorflow_savedmodel"'

    return write


def reference_variable(version: Path) -> str:
    """A SavedModel of TensorFlow 1."""
    v1 = tf.compat.v1
    with v1.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [1, 4], "x")
        total = v1.get_variable("total", initializer=tf.ones([1, 4]), use_resource=False)
        y = v1.assign_add(total, x) + 0.0
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(version / "model.savedmodel"), {"x": x}, {"y": y})
    return 'platform: "tensorflow_savedmodel"'


def tflite_variable(version: Path) -> str:
    module = Variable()
    convert = tf.lite.TFLiteConverter.from_concrete_functions
    converter = convert([function(module, "add")], module)
    converter.experimental_enable_resource_variables = True
    (version / "model.tflite").write_bytes(converter.convert())
    return 'backend: "tflite"'


def tflite_tensor(version: Path) -> str:
    """SVDF, with the last four inputs in a variable tensor; its outputs are their sums."""

    def tensor(name: str, shape: list[int], buffer: int, variable: bool = False) -> Any:
        made = schema.TensorT()
        made.name, made.shape, made.buffer, made.isVariable = name, shape, buffer, variable
        return made

    def buffer(array: Any = ()) -> Any:
        made = schema.BufferT()
        made.data = np.frombuffer(np.asarray(array, np.float32).tobytes(), np.uint8)
        return made

    code, operator, options = schema.OperatorCodeT(), schema.OperatorT(), schema.SVDFOptionsT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.SVDF
    options.rank = 1
    operator.inputs, operator.outputs = [0, 1, 2, -1, 3], [4]
    operator.builtinOptionsType, operator.builtinOptions = (
        schema.BuiltinOptions.SVDFOptions,
        options,
    )
    graph, model = schema.SubGraphT(), schema.ModelT()
    graph.tensors = [
        tensor("x", [1, 4], 0), tensor("features", [4, 4], 1), tensor("times", [4, 4], 2),
        tensor("state", [1, 16], 0, variable=True), tensor("y", [1, 4], 0),
    ]  # fmt: skip
    graph.inputs, graph.outputs, graph.operators = [0], [4], [operator]
    model.version, model.operatorCodes, model.subgraphs = 3, [code], [graph]
    model.buffers = [buffer(), buffer(np.eye(4)), buffer(np.ones((4, 4)))]
    content = flatbuffer_utils.convert_object_to_bytearray(model)
    (version / "model.tflite").write_bytes(content)
    return 'backend: "tflite"'


def read_value(version: Path) -> str:
    """An OpenVINO model with a state."""
    from openvino import opset6 as ops  # as in files of today
    from openvino.op.util import Variable as State
    from openvino.op.util import VariableInfo

    info = VariableInfo()
    info.data_shape, info.data_type = openvino.PartialShape([1, 4]), openvino.Type.f32
    info.variable_id = "total"
    state = State(info)
    x = openvino.opset13.parameter([1, 4], np.float32, name="x")
    x.output(0).set_names({"x"})
    old = ops.read_value(openvino.opset13.constant(np.ones((1, 4), np.float32)), state)
    new = openvino.opset13.add(old, x)
    new.output(0).set_names({"y"})
    model = openvino.Model([openvino.opset13.result(new)], [ops.assign(new, state)], [x], "m")
    openvino.save_model(model, version / "model.xml")
    return 'backend: "openvino"'


STATEFUL = {
    "torchscript-buffer": script(Buffer),
    "torchscript-view": script(BufferView),
    "torchscript-rare": script(Rare),
    "torchscript-attribute": script(Attribute),
    "torchscript-list": script(Cache),
    "pt2-buffer": export(Buffer),
    "pt2-view": export(BufferView),
    "pt2-rare": export(Rare),
    "pt2-functional": export(BufferView, functional=True),
    "savedmodel": saved(Variable, "add"),
    "savedmodel-rare": saved(Variable, "sometimes"),
    "savedmodel-1": reference_variable,
    "tflite-variable": tflite_variable,
    "tflite-tensor": tflite_tensor,
    "openvino": read_value,
}


class Noise(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class NoisyVariable(Variable):
    def noise(self, x: Any) -> dict[str, Any]:
        return {"y": x + tf.random.uniform([1, 4])}

    def generator(self, x: Any) -> dict[str, Any]:
        return {"y": x + self.random.uniform([1, 4])}

    def __init__(self) -> None:
        super().__init__()
        self.random = tf.random.Generator.from_seed(1)


def noisy_tflite(version: Path) -> str:
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [function(NoisyVariable(), "noise")]
    )
    (version / "model.tflite").write_bytes(converter.convert())
    return 'backend: "tflite"'


def noisy_onnx(version: Path) -> str:
    value = helper.make_tensor_value_info
    models.save(
        version / "model.onnx",
        helper.make_graph(
            [helper.make_node("RandomUniformLike", ["x"], ["y"])],
            "noise",
            [value("x", TensorProto.FLOAT, [1, 4])],
            [value("y", TensorProto.FLOAT, [1, 4])],
        ),
    )
    return 'backend: "onnxruntime"'


def noisy_openvino(version: Path) -> str:
    ops = openvino.opset13
    x = ops.parameter([1, 4], np.float32, name="x")
    x.output(0).set_names({"x"})
    shape, low, high = (ops.constant(value) for value in (np.array([1, 4]), 0.0, 1.0))
    low, high = (ops.convert(value, "f32") for value in (low, high))
    y = ops.add(x, ops.random_uniform(shape, low, high, "f32"))
    y.output(0).set_names({"y"})
    openvino.save_model(openvino.Model([ops.result(y)], [x], "m"), version / "model.xml")
    return 'backend: "openvino"'


RANDOM_MODELS = {
    "torchscript": script(Noise),
    "pt2": export(Noise),
    "savedmodel": saved(NoisyVariable, "noise"),
    "savedmodel-generator": saved(NoisyVariable, "generator"),
    "tflite": noisy_tflite,
    "onnx": noisy_onnx,
    "openvino": noisy_openvino,
}


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """The folder and the configuration of a model of ``STATEFUL``."""
    written: dict[str, tuple[Path, str]] = {}

    def version(name: str) -> tuple[Path, str]:
        if name not in written:
            folder = tmp_path_factory.mktemp(name) / "1"
            folder.mkdir()
            written[name] = folder, STATEFUL[name](folder)
        return written[name]

    return version


Versions = Callable[[str], tuple[Path, str]]


def answers(backend: Backend, *inputs: Any) -> list[list[float]]:
    """The answers to requests that follow each other."""
    found = []
    for data in inputs:
        response = run(backend, fp32(data))
        found.append(response.outputs[0].data.ravel().tolist())
    return found


def depends_on_itself_only(backend: Backend) -> bool:
    first = answers(backend, A, A, B, A, B, B, A)
    return all(a == first[0] for a in (first[1], first[3], first[6])) and (
        first[2] == first[4] == first[5]
    )


@pytest.mark.parametrize("name", STATEFUL)
def test_an_answer_depends_on_its_own_request_only(name: str, versions: Versions) -> None:
    backend = load(*versions(name))
    try:
        assert depends_on_itself_only(backend)
        assert answers(backend, B) != answers(backend, A)
    finally:
        backend.unload()


@pytest.mark.parametrize("name", STATEFUL)
async def test_requests_side_by_side_do_not_meet_in_the_state(
    name: str, versions: Versions
) -> None:
    folder, text = versions(name)
    backend = load(folder, text + " instance_group { count: 4 kind: KIND_CPU }")

    async def ask(data: Any) -> list[float]:
        request = InferRequest("m", [fp32(data)])
        response = await finished(backend(request, NO_DEADLINE))
        found: list[float] = response.outputs[0].data.ravel().tolist()
        return found

    found = await asyncio.gather(*(ask(data) for _ in range(50) for data in (A, B)))
    assert len({tuple(answer) for answer in found[::2]}) == 1
    assert len({tuple(answer) for answer in found[1::2]}) == 1
    backend.unload()


class RowSum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum(0))
        return x + self.total


BATCHED = """
backend: "pytorch" max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 50000 }
input { name: "x" data_type: TYPE_FP32 dims: 4 } output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""


@pytest.mark.parametrize("joins", [False, True], ids=["", "known-bad: one batch"])
async def test_requests_do_not_meet_in_the_state_of_a_batch(joins: bool, tmp_path: Path) -> None:
    torch.jit.script(RowSum()).save(str(tmp_path / "model.pt"))
    backend = load(tmp_path, BATCHED)
    assert not backend.execution.joins
    backend.execution = backend.execution._replace(joins=joins)
    signature = configuration.signature(backend.config)
    infer = Schedulers(backend, Statistics()).batched(signature)
    requests = [InferRequest("m", [fp32(data)]) for data in (A, B, A, B)]
    found = await asyncio.gather(*(finished(infer(each, NO_DEADLINE)) for each in requests))
    values = [response.outputs[0].data[0, 0] for response in found]
    assert (values == [2, 100, 2, 100]) is not joins
    backend.unload()


# -- known-bad variants ---------------------------------------------------------------------------


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """No runtime finds state in an artifact."""
    monkeypatch.setattr(
        tflite_guard, "state", lambda *_: tflite_guard.TfliteState(False, False, False)
    )
    for name in ("_script_state", "_exported_state"):
        monkeypatch.setattr(pytorch_graphs, name, lambda _: pytorch_graphs.ModuleState(()))
    monkeypatch.setattr(tensorflow_state, "WRITERS", re.compile("none"))

    class Blind(openvino_backend.OpenVinoSession):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.state = ""

    monkeypatch.setattr(openvino_backend, "OpenVinoSession", Blind)


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("name", [name for name in STATEFUL if "rare" not in name])
def test_state_that_no_runtime_knows_of_is_found_by_running_the_model(
    name: str, versions: Versions
) -> None:
    with pytest.raises(Unsupported, match=r"'model.\w+' keeps state between requests: output 'y'"):
        load(*versions(name))


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("name", STATEFUL)
def test_the_property_fails_where_nothing_is_reset(
    name: str, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(independence, "differing_output", lambda *_: "")
    backend = load(*versions(name))
    assert not depends_on_itself_only(backend)
    backend.unload()


# -- what is no state -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_random_numbers_are_drawn_afresh_for_every_request(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "1"
    folder.mkdir()
    backend = load(folder, RANDOM_MODELS[name](folder))
    first, second = answers(backend, A, A)
    assert first != second
    backend.unload()


def test_a_normalisation_that_counts_batches_in_training_keeps_no_state(tmp_path: Path) -> None:
    class Normalised(torch.nn.Sequential):
        def __init__(self) -> None:
            super().__init__(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(True))

    torch.jit.script(Normalised().eval()).save(tmp_path / "model.pt")
    module = torch.jit.load(tmp_path / "model.pt").eval()
    assert pytorch_graphs.of_script(module).state.names == ""
    module = torch.jit.load(tmp_path / "model.pt").train()
    assert not pytorch_graphs.of_script(module).random


# -- TensorFlow -----------------------------------------------------------------------------------


def test_a_signature_that_trains_changes_no_answer_of_another(tmp_path: Path) -> None:
    module = Variable()
    module.read = tf.function(lambda x: {"y": module.total * x})
    wanted = tf.TensorSpec([1, 4], tf.float32, "x")
    signatures = {
        "serving_default": module.read.get_concrete_function(wanted),
        "train": function(module, "add"),
    }
    tf.saved_model.save(module, str(tmp_path / "1/model.savedmodel"), signatures=signatures)
    backend = load(tmp_path / "1", 'platform: "tensorflow_savedmodel"')

    def ask(signature: str) -> list[float]:
        async def main() -> InferResponse:
            request = InferRequest("m", [fp32(B)], signature=signature)
            return await finished(backend(request, NO_DEADLINE))

        return [float(value) for value in asyncio.run(main()).outputs[0].data.ravel()]

    asked = ["", "train", "", "train", "serving_default", "train"]
    assert [ask(signature)[0] for signature in asked] == [50, 51, 50, 51, 50, 51]
    backend.unload()


def test_a_table_that_a_request_fills_is_refused(tmp_path: Path) -> None:
    module = tf.Module()
    module.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    @tf.function(input_signature=[tf.TensorSpec([1], tf.int64, "k")])  # type: ignore[untyped-decorator]
    def count(k: Any) -> Any:
        found = module.table.lookup(k) + 1.0
        module.table.insert(k, found)
        return {"y": found}

    module.count = count
    tf.saved_model.save(module, str(tmp_path / "1/model.savedmodel"), signatures=count)
    with pytest.raises(Unsupported, match="signature 'serving_default' writes to table"):
        load(tmp_path / "1", 'platform: "tensorflow_savedmodel"')


#: Operators with side effects that end with the run, or that only read.
HARMLESS = re.compile(
    r"Anonymous\w*Table\w*|Mutable\w*Table\w*|HashTable(V2)?|InitializeTable(V2)?"
    r"|LookupTable(Find|Size|Export)(V2)?|Assert|CheckNumerics\w*|Case|If|While"
    r"|StatefulPartitionedCall|StatelessRandomGet\w+|TensorArray\w*|Stack\w*|_Arg|_Retval"
    r"|\w*TemporaryVariable|Variable(V2|Shape)?|VarHandleOp|VarIsInitializedOp|ReadVariableOp"
    r"|ResourceGather(Nd)?|Ref\w+|IsVariableInitialized|DestroyResourceOp|DisableCopyOnRead"
    r"|IsResourceHandleRefCounting|IsTensorFloat32Enabled|DeviceIndex|Empty|GuaranteeConst"
    r"|CudnnRNN\w*|DummyMemoryCache"
)


def test_every_operator_with_an_effect_is_known() -> None:
    from tensorflow.python.framework import op_def_registry

    definitions = map(op_def_registry.get, sorted(saved_model_guard.PURE))
    effective = [
        each.name
        for each in definitions
        if each is not None
        and (each.is_stateful or any(a.is_ref or a.type == 20 for a in each.input_arg))
    ]
    kinds = {"writes": tensorflow_state.WRITERS, "draws": tensorflow_state.RANDOM, "": HARMLESS}
    found = {
        name: [kind for kind, pattern in kinds.items() if pattern.fullmatch(name)]
        for name in effective
    }
    assert {name: kinds for name, kinds in found.items() if len(kinds) != 1} == {}
    assert len(effective) > 100


# -- the check itself -----------------------------------------------------------------------------

SIGNATURE = ModelSignature(
    (TensorSpec("x", Datatype.FP32, (4,)),), (TensorSpec("y", Datatype.FP32, (4,)),), 8
)


def checked(answer: Callable[[int, Array], Array], datatype: Datatype = Datatype.FP32) -> str:
    calls = itertools.count()

    def infer(request: InferRequest) -> InferResponse:
        data = answer(next(calls), request.inputs[0].data)
        return InferResponse("m", 1, [Tensor("y", datatype, data)])

    return independence.differing_output(infer, "m", SIGNATURE)


def test_rounding_and_a_rare_change_of_a_decision_are_no_state() -> None:
    assert checked(lambda call, x: x + np.float32(1 + 1e-6 * call)) == ""
    assert checked(lambda call, x: np.full(4, np.nan, np.float32)) == ""
    assert checked(lambda call, x: np.array([call == 2]), Datatype.BOOL) == ""


def test_what_depends_on_calls_before_is_state() -> None:
    kept = [np.zeros((1, 4), np.float32)]
    largest_yet = kept[:]

    def before(call: int, x: Array) -> Array:
        kept.append(x)
        return kept[-2]

    def largest(call: int, x: Array) -> Array:
        largest_yet[:] = [np.maximum(x, *largest_yet)]
        return largest_yet[0]

    assert checked(before) == "y"
    assert checked(largest) == "y"
    assert checked(lambda call, x: x + call) == "y"
    assert checked(lambda call, x: np.zeros(call), Datatype.INT64) == "y"


def test_a_model_that_refuses_the_requests_is_not_judged() -> None:
    def refuse(call: int, x: Array) -> Array:
        raise Internal("no zeros")

    assert checked(refuse) == ""
