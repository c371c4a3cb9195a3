"""The embedded ONNX Runtime: every datatype, checked and warm at load, refused with a reason."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from modelport.gateway.backend_registry import BACKENDS, BackendDescriptor, find_loader
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded import warmup
from modelport.gateway.backends.embedded.embedded_backend import EmbeddedBackend
from modelport.gateway.backends.embedded.onnxruntime import load
from modelport.gateway.errors import InvalidArgument, ModelportError, Unsupported
from modelport.gateway.models.inference_service import InferenceService
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.protocols.oip import metadata
from modelport.gateway.repository import config as configuration
from modelport.gateway.settings import Settings
from modelport.gateway.types import (
    NO_DEADLINE,
    NUMPY_DTYPES,
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    Tensor,
    finished,
)
from tests import models


def artifact(version: Path, text: str = "") -> Artifact:
    config = configuration.complete(configuration.parse('backend: "onnxruntime"' + text), "m")
    return Artifact("m", 1, version, config, 1)


def served(version: Path, text: str = "") -> EmbeddedBackend:
    return load(artifact(version, text))


def refused(version: Path, text: str = "") -> str:
    with pytest.raises(ModelportError) as caught:
        load(artifact(version, text))
    return str(caught.value)


def run(
    backend: EmbeddedBackend,
    *tensors: Tensor,
    outputs: tuple[str, ...] = (),
    deadline: Deadline = NO_DEADLINE,
) -> InferResponse:
    return asyncio.run(_run(backend, InferRequest("m", list(tensors), outputs), deadline))


async def _run(
    backend: EmbeddedBackend, request: InferRequest, deadline: Deadline
) -> InferResponse:
    return await finished(backend(request, deadline))


def fp32(data: Any, name: str = "x") -> Tensor:
    return Tensor(name, Datatype.FP32, np.asarray(data, np.float32))


SAMPLES: dict[Datatype, list[Any]] = {
    Datatype.BOOL: [True, False, True, True],
    Datatype.BYTES: [b"", b"text", "Zürich".encode(), b"with\0nul"],
    Datatype.BF16: [0x0000, 0x3F80, 0x7FC0, 0xFF80],
    **{d: [0, 1, np.iinfo(NUMPY_DTYPES[d]).min, np.iinfo(NUMPY_DTYPES[d]).max]
       for d in Datatype if d.startswith(("INT", "UINT"))},
    **{d: [0.0, -0.0, np.nan, np.inf] for d in (Datatype.FP16, Datatype.FP32, Datatype.FP64)},
}  # fmt: skip


# -- datatypes ------------------------------------------------------------------------------------


def test_the_samples_cover_every_datatype() -> None:
    assert set(SAMPLES) == set(Datatype)


@pytest.mark.parametrize("datatype", list(Datatype))
def test_every_datatype_comes_back_bit_by_bit(datatype: Datatype, tmp_path: Path) -> None:
    models.identity(tmp_path / "model.onnx", datatype)
    data = np.array([SAMPLES[datatype]], NUMPY_DTYPES[datatype])
    (y,) = run(served(tmp_path), Tensor("x", datatype, data)).outputs
    assert (y.name, y.datatype, y.data.shape) == ("y", datatype, (1, 4))
    assert y.data.dtype == NUMPY_DTYPES[datatype]
    if datatype is Datatype.BYTES:
        assert y.data.tolist() == data.tolist()
    else:
        assert y.data.tobytes() == data.tobytes()


@pytest.mark.parametrize("datatype", list(Datatype))
def test_every_datatype_may_be_empty(datatype: Datatype, tmp_path: Path) -> None:
    models.identity(tmp_path / "model.onnx", datatype, ("batch", "n"))
    empty = np.zeros((2, 0), NUMPY_DTYPES[datatype])
    (y,) = run(served(tmp_path), Tensor("x", datatype, empty)).outputs
    assert y.data.shape == (2, 0)
    assert y.data.dtype == NUMPY_DTYPES[datatype]


@pytest.mark.parametrize("datatype", list(Datatype))
def test_every_datatype_may_be_a_scalar(datatype: Datatype, tmp_path: Path) -> None:
    models.identity(tmp_path / "model.onnx", datatype, ())
    backend = served(tmp_path)
    data = np.array(SAMPLES[datatype][1], NUMPY_DTYPES[datatype])
    (y,) = run(backend, Tensor("x", datatype, data)).outputs
    assert y.data.shape == ()
    assert y.data.tolist() == data.tolist()


@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.FP64, Datatype.BF16, Datatype.INT64])
def test_unaligned_and_strided_input_is_computed_correctly(
    datatype: Datatype, tmp_path: Path
) -> None:
    models.identity(tmp_path / "model.onnx", datatype, ("batch", 4))
    backend = served(tmp_path)
    dtype = NUMPY_DTYPES[datatype]
    plain = np.arange(1, 9).astype(dtype).reshape(2, 4)
    unaligned = np.frombuffer(b"\0" + plain.tobytes(), dtype, 8, 1).reshape(2, 4)
    assert not unaligned.flags.aligned
    strided = np.repeat(plain, 2, axis=1)[:, ::2]
    assert not strided.flags.c_contiguous
    for data in (unaligned, strided, np.asfortranarray(plain)):
        (y,) = run(backend, Tensor("x", datatype, data)).outputs
        assert y.data.tolist() == plain.tolist()


def test_input_that_may_not_be_written_to_is_taken_as_it_is(tmp_path: Path) -> None:
    models.multiply(tmp_path / "model.onnx", 2.0)
    data = np.frombuffer(np.ones((1, 4), np.float32).tobytes(), np.float32).reshape(1, 4)
    (y,) = run(served(tmp_path), Tensor("x", Datatype.FP32, data)).outputs
    assert y.data.tolist() == [[2.0] * 4]


def test_bytes_that_are_no_text_are_refused_naming_the_input(tmp_path: Path) -> None:
    models.identity(tmp_path / "model.onnx", "BYTES")
    data = np.array([[b"\xff"] * 4], object)
    with pytest.raises(InvalidArgument, match="input 'x' holds bytes that are not UTF-8"):
        run(served(tmp_path), Tensor("x", Datatype.BYTES, data))


def test_bytes_of_any_kind_pass_through_where_the_configuration_says_latin_1(
    tmp_path: Path,
) -> None:
    models.identity(tmp_path / "model.onnx", "BYTES", ("batch", 3))
    text = models.config("m", ["x BYTES 3"], ["y BYTES 3"], 4, "")
    text = text.replace('backend: ""', "")
    encoding = 'parameters { key: "string_encoding" value { string_value: "%s" } }'
    backend = served(tmp_path, text + encoding % "latin-1")
    data = np.array([[bytes(range(256)), b"", "Zürich".encode()]], object)
    (y,) = run(backend, Tensor("x", Datatype.BYTES, data)).outputs
    assert y.data.tolist() == data.tolist()
    said = refused(tmp_path, text + encoding % "utf-16")
    assert said == "parameter 'string_encoding' must be 'utf-8' or 'latin-1', not 'utf-16'"


@pytest.mark.parametrize("shape", [(), None])
@pytest.mark.parametrize("dims", [[1], [1, 1], [2, 3]])
def test_a_scalar_and_a_tensor_without_rank_may_be_declared_with_dims(
    shape: tuple[int, ...] | None, dims: list[int], tmp_path: Path
) -> None:
    """The runtime reports both as ``[]``, and takes what it is given."""
    tensors = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("x", "y")]
    node = helper.make_node("Identity", ["x"], ["y"])
    graph = helper.make_graph([node], "g", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    sizes = ",".join(map(str, dims))
    text = models.config("m", [f"x FP32 {sizes}"], [f"y FP32 {sizes}"], 0, "")
    text = text.replace('backend: ""', "")
    (y,) = run(served(tmp_path, text), fp32(np.ones(dims))).outputs
    assert y.data.shape == tuple(dims)


# -- outputs --------------------------------------------------------------------------------------


def test_outputs_come_in_the_models_order_unless_asked_otherwise(tmp_path: Path) -> None:
    models.add_and_subtract(tmp_path / "model.onnx")
    backend = served(tmp_path)
    inputs = (fp32([[3, 4]], "a"), fp32([[1, 1]], "b"))
    assert [t.name for t in run(backend, *inputs).outputs] == ["total", "difference"]
    asked = run(backend, *inputs, outputs=("difference", "total")).outputs
    assert [(t.name, t.data.tolist()) for t in asked] == [
        ("difference", [[2, 3]]),
        ("total", [[4, 5]]),
    ]
    assert [t.name for t in run(backend, *inputs, outputs=("difference",)).outputs] == [
        "difference"
    ]


def test_an_answer_says_which_model_and_version_it_is_from(tmp_path: Path) -> None:
    models.multiply(tmp_path / "model.onnx")
    response = run(served(tmp_path), fp32([[1, 2, 3, 4]]))
    assert (response.model_name, response.model_version) == ("m", 1)


def test_a_run_without_all_inputs_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    """The configuration may declare an input optional that the model requires."""
    models.add_and_subtract(tmp_path / "model.onnx")
    with pytest.raises(ModelportError, match=r"Required inputs \(\['b'\]\) are missing"):
        run(served(tmp_path), fp32([[3, 4]], "a"))


def test_an_initializer_that_the_configuration_declares_is_an_optional_input(
    tmp_path: Path,
) -> None:
    """ONNX lets a request replace initializers that are also among the graph's inputs."""
    shape = [2]
    tensors = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("x", "w", "y")]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        *("m", tensors[:2], tensors[2:]),
        [numpy_helper.from_array(np.ones(shape, np.float32), "w")],
    )
    opset = helper.make_opsetid("", 18)
    onnx.save(
        helper.make_model(graph, opset_imports=[opset], ir_version=8), tmp_path / "model.onnx"
    )
    declared = (
        'input { name: "x" data_type: TYPE_FP32 dims: 2 }\n'
        'input { name: "w" data_type: TYPE_FP32 dims: 2 optional: true }\n'
        'output { name: "y" data_type: TYPE_FP32 dims: 2 }\n'
    )
    backend = served(tmp_path, declared)
    (alone,) = run(backend, fp32([3, 4])).outputs
    (both,) = run(backend, fp32([3, 4]), fp32([10, 20], "w")).outputs
    assert (alone.data.tolist(), both.data.tolist()) == ([4, 5], [13, 24])
    assert [t.name for t in served(tmp_path).config.input] == ["x"]


def test_what_the_runtime_refuses_is_an_internal_error_without_paths(tmp_path: Path) -> None:
    models.multiply(tmp_path / "model.onnx")
    with pytest.raises(ModelportError, match="inference failed") as caught:
        run(served(tmp_path), fp32([[1, 2, 3]]))
    assert "/" not in str(caught.value)
    assert "inference failed" in str(caught.value)


# -- configuration --------------------------------------------------------------------------------


def test_the_configuration_is_completed_from_the_model(tmp_path: Path) -> None:
    models.multiply(tmp_path / "model.onnx")
    config = served(tmp_path).config
    assert config.max_batch_size == 4
    assert [(t.name, list(t.dims)) for t in config.input] == [("x", [4])]
    assert [(t.name, list(t.dims)) for t in config.output] == [("y", [4])]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (' input { name: "z" data_type: TYPE_FP32 dims: [ -1, 4 ] }', "declares input 'z'"),
        (' input { name: "x" data_type: TYPE_FP64 dims: [ -1, 4 ] }', "as TYPE_FP64"),
        (' input { name: "x" data_type: TYPE_FP32 dims: [ -1, 5 ] }', "the model has [-1, 4]"),
        (' output { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }', "declares output 'x'"),
    ],
)
def test_a_configuration_that_contradicts_the_model_is_refused(
    text: str, reason: str, tmp_path: Path
) -> None:
    models.multiply(tmp_path / "model.onnx")
    assert reason in refused(tmp_path, text)


def test_batching_a_model_of_fixed_size_is_refused_with_the_remedy(tmp_path: Path) -> None:
    models.identity(tmp_path / "model.onnx", "FP32", (1, 4))
    assert "set max_batch_size to 0" in refused(tmp_path, " max_batch_size: 8")


def test_an_input_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    sequence = helper.make_sequence_type_proto(
        helper.make_tensor_type_proto(TensorProto.FLOAT, [None])
    )
    graph = helper.make_graph(
        [helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0)],
        "sequence",
        [helper.make_value_info("s", sequence)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None])],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10),
        tmp_path / "model.onnx",
    )
    with pytest.raises(Unsupported, match="'s' is a seq"):
        load(artifact(tmp_path))


# -- files that are not what they should be -------------------------------------------------------


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path) == "'model.onnx' is missing from version 1"


def test_a_folder_in_the_files_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").mkdir()
    assert "'model.onnx'" in refused(tmp_path)


@pytest.mark.parametrize("damage", ["empty", "text", "truncated", "flipped"])
def test_a_damaged_file_is_refused_without_its_path(damage: str, tmp_path: Path) -> None:
    path = models.multiply(tmp_path / "model.onnx")
    whole = path.read_bytes()
    flipped = bytes(byte ^ 0xFF for byte in whole)
    content = {"empty": b"", "text": b"hello", "truncated": whole[:-20], "flipped": flipped}
    path.write_bytes(content[damage])
    reason = refused(tmp_path)
    assert reason.startswith("'model.onnx' does not load:")
    assert str(tmp_path) not in reason


def test_an_operator_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Backdoor", ["x"], ["y"], domain="com.evil")],
        "custom",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.evil", 1)]
    onnx.save(
        helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "model.onnx"
    )
    reason = refused(tmp_path)
    assert "Backdoor" in reason
    assert str(tmp_path) not in reason


@pytest.mark.parametrize("damage", ["truncated", "no weights", "weights outside", "no operator"])
def test_a_reason_holds_no_folder_of_the_repository_even_with_spaces(
    damage: str, tmp_path: Path
) -> None:
    version = tmp_path / "secret models of ours" / "repository two" / "m" / "1"
    path = version / "model.onnx"
    if damage == "truncated":
        content = models.multiply(path).read_bytes()
        path.write_bytes(content[:-20])
    elif damage == "no operator":
        graph = models.identity(path, "FP32")
        model = onnx.load(graph)
        model.graph.node[0].op_type = "Nothing"
        onnx.save(model, path)
    else:
        weights(version.parents[1] / "outside.bin")
        outside = damage == "weights outside"
        models.external(path, "../../outside.bin" if outside else "weights.bin")
    reason = refused(version)
    assert reason.startswith("'model.onnx' does not load:")
    for part in ("secret", "ours", "repository", "two", tmp_path.name, str(tmp_path)):
        assert part not in reason, reason


# -- external data --------------------------------------------------------------------------------


def weights(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.full(4, 7, np.float32).tobytes())
    return path


def test_external_data_beside_the_model_is_read(tmp_path: Path) -> None:
    models.external(tmp_path / "1" / "model.onnx", "weights.bin")
    weights(tmp_path / "1" / "weights.bin")
    (y,) = run(served(tmp_path / "1"), fp32([1, 1, 1, 1])).outputs
    assert y.data.tolist() == [8.0] * 4


@pytest.mark.parametrize("where", ["relative", "absolute", "detour", "sibling"])
def test_external_data_that_leaves_the_folder_is_refused(where: str, tmp_path: Path) -> None:
    outside = weights(tmp_path / "outside.bin")
    sibling = weights(tmp_path / "1-secret" / "weights.bin")
    location = {
        "relative": "../outside.bin",
        "absolute": str(outside),
        "detour": "sub/../../outside.bin",
        "sibling": "../1-secret/weights.bin",
    }[where]
    assert sibling.is_file()
    models.external(tmp_path / "1" / "model.onnx", location)
    (tmp_path / "1" / "sub").mkdir()
    reason = refused(tmp_path / "1")
    assert reason.startswith("'model.onnx' does not load")
    assert str(tmp_path) not in reason


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_external_data_behind_a_link_out_of_the_folder_is_refused(
    kind: str, tmp_path: Path
) -> None:
    weights(tmp_path / "outside" / "weights.bin")
    version = tmp_path / "1"
    version.mkdir()
    if kind == "file":
        models.external(version / "model.onnx", "weights.bin")
        (version / "weights.bin").symlink_to(tmp_path / "outside" / "weights.bin")
    else:
        models.external(version / "model.onnx", "data/weights.bin")
        (version / "data").symlink_to(tmp_path / "outside")
    assert "does not load" in refused(version)


def test_external_data_behind_a_hard_link_is_a_file_like_any_other(tmp_path: Path) -> None:
    """A hard link is made by whoever may write to the folder; nothing tells it from a copy."""
    weights(tmp_path / "outside.bin")
    models.external(tmp_path / "1" / "model.onnx", "weights.bin")
    (tmp_path / "1" / "weights.bin").hardlink_to(tmp_path / "outside.bin")
    try:
        backend = served(tmp_path / "1")
    except InvalidArgument:
        return
    (y,) = run(backend, fp32([1, 1, 1, 1])).outputs
    assert y.data.tolist() == [8.0] * 4


# -- warm-up, threads, the end --------------------------------------------------------------------


def test_batch_sizes_down_to_one_are_warmed_largest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.multiply(tmp_path / "model.onnx")
    batches: list[int] = []
    real = EmbeddedBackend._run

    def counted(self: EmbeddedBackend, request: InferRequest) -> InferResponse:
        batches.append(request.inputs[0].data.shape[0])
        return real(self, request)

    monkeypatch.setattr(EmbeddedBackend, "_run", counted)
    served(tmp_path, " max_batch_size: 6")
    assert list(dict.fromkeys(batches))[:3] == [6, 3, 1]
    assert max(batches) == 6


def test_warming_uses_the_largest_valid_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.identity(tmp_path / "model.onnx", "INT64", ("batch", "n"))
    seen: list[tuple[tuple[int, ...], int, int]] = []
    real = EmbeddedBackend._run

    def counted(self: EmbeddedBackend, request: InferRequest) -> InferResponse:
        data = request.inputs[0].data
        seen.append((data.shape, int(data.min()), int(data.max())))
        return real(self, request)

    monkeypatch.setattr(EmbeddedBackend, "_run", counted)
    served(
        tmp_path,
        """ max_batch_size: 2 input { name: "x" data_type: TYPE_INT64 dims: -1 }
        parameters { key: "axes.x" value { string_value: "n" } }
        parameters { key: "axis.n" value { string_value: "1..7" } }
        parameters { key: "range.x" value { string_value: "3..9" } }""",
    )
    assert {shape for shape, _, _ in seen} == {(2, 7), (1, 7)}
    assert all(low >= 3 and high <= 9 for _, low, high in seen)


def test_a_batch_whose_inputs_are_too_large_is_not_warmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.multiply(tmp_path / "model.onnx")  # 16 bytes in and 16 out an element
    batches: set[int] = set()
    real = EmbeddedBackend._run

    def counted(self: EmbeddedBackend, request: InferRequest) -> InferResponse:
        batches.add(request.inputs[0].data.shape[0])
        return real(self, request)

    monkeypatch.setattr(EmbeddedBackend, "_run", counted)
    monkeypatch.setattr(warmup, "WARMUP_MAX_BYTES", 70)
    backend = served(tmp_path, " max_batch_size: 6")
    assert batches == {1, 2}
    (y,) = run(backend, fp32(np.ones((6, 4)))).outputs
    assert y.data.shape == (6, 4)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (" max_batch_size: 2147483647", "'max_batch_size' 2147483647 allows a batch"),
        (" instance_group { kind: KIND_CPU count: 1505 }", "asks for 1505 instances"),
    ],
)
def test_what_no_machine_can_hold_is_refused_by_the_field_that_asks_for_it(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.multiply(tmp_path / "model.onnx")
    monkeypatch.setattr(EmbeddedBackend, "_run", None)  # nothing is run for it
    assert reason in refused(tmp_path, text)


def test_a_large_batch_is_warmed_no_further_than_its_declared_sizes_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.multiply(tmp_path / "model.onnx")  # 16 bytes in, 16 out
    batches: list[int] = []
    real = EmbeddedBackend._run

    def counted(self: EmbeddedBackend, request: InferRequest) -> InferResponse:
        batches.append(request.inputs[0].data.shape[0])
        return real(self, request)

    monkeypatch.setattr(EmbeddedBackend, "_run", counted)
    monkeypatch.setattr(warmup, "WARMUP_MAX_BATCH_BYTES", 32 * 1000)
    served(tmp_path, " max_batch_size: 1048576").unload()
    assert max(batches) == 512


def of_unknown_rank(path: Path) -> None:
    """FP32 ``y`` is always ``[2, 3]``, which no inference of shapes can tell; ``x`` is ``[2]``."""
    nodes = [
        helper.make_node("Abs", ["x"], ["size"]),
        helper.make_node("LessOrEqual", ["size", "huge"], ["all"]),
        helper.make_node("Compress", ["dims", "all"], ["shape"], axis=0),
        helper.make_node("Reshape", ["data", "shape"], ["y"]),
    ]
    initializers = {
        "huge": np.array(1e30, np.float32),
        "dims": np.array([2, 3]),
        "data": np.arange(6, dtype=np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "unknown",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path.parent.mkdir(parents=True)
    onnx.save(model, path)


@pytest.mark.parametrize("dims", [None, [-1, -1], [2, 3]])
async def test_an_output_of_unknown_rank_is_served_with_the_rank_it_has(
    dims: list[int] | None, tmp_path: Path
) -> None:
    path = tmp_path / "m" / "1" / "model.onnx"
    of_unknown_rank(path)
    (output,) = ort.InferenceSession(path).get_outputs()
    assert len(output.shape) != 2, "the runtime knows its rank"
    if dims is not None:
        (tmp_path / "m" / "config.pbtxt").write_text(
            'backend: "onnxruntime" input { name: "x" data_type: TYPE_FP32 dims: 2 } '
            f'output {{ name: "y" data_type: TYPE_FP32 dims: {dims} }}'
        )
    manager = ModelManager(Settings((tmp_path,)))
    await manager.start()
    assert [row["state"] for row in manager.index()] == ["READY"], manager.index()
    (declared,) = metadata.model_metadata(manager, "m", 0)["outputs"]
    assert declared == {"name": "y", "datatype": "FP32", "shape": dims or [-1, -1]}
    request = InferRequest("m", [fp32([1, 1])])
    response = await finished(InferenceService(manager).infer(request, NO_DEADLINE))
    assert response.outputs[0].data.tolist() == [[0, 1, 2], [3, 4, 5]]
    await manager.stop()


def test_a_model_that_refuses_made_up_values_is_served_cold(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["data", "shape"], ["y"])],
        "picky",
        [helper.make_tensor_value_info("shape", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
        [numpy_helper.from_array(np.arange(4, dtype=np.float32), "data")],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10),
        tmp_path / "model.onnx",
    )
    backend = served(
        tmp_path,
        ' input { name: "shape" data_type: TYPE_INT64 dims: 1 }'
        ' parameters { key: "range.shape" value { string_value: "3..4" } }',
    )
    (y,) = run(backend, Tensor("shape", Datatype.INT64, np.array([4]))).outputs
    assert y.data.tolist() == [0, 1, 2, 3]


def test_unloading_ends_the_threads(tmp_path: Path) -> None:
    models.count_up(tmp_path / "model.onnx")
    before = set(threading.enumerate())
    backend = served(
        tmp_path,
        ' input { name: "n" data_type: TYPE_INT64 dims: 1 } instance_group { count: 2 }'
        ' parameters { key: "range.n" value { string_value: "1000.." } }',
    )

    run(backend, Tensor("n", Datatype.INT64, np.array([1000])))
    made = set(threading.enumerate()) - before
    assert any(thread.name.startswith("m-1") for thread in made)
    backend.unload()
    assert [t for t in made if t.is_alive() and t.name.startswith("m-1")] == []


@pytest.mark.parametrize(
    ("milliseconds", "cores", "text", "inline"),
    [
        (0.05, 4, "", True),
        (0.05, 4, "dynamic_batching {}", True),
        (0.5, 4, "", False),  # meanwhile the loop would have another core
        (0.5, 1, "", True),
        (0.5, 1, "dynamic_batching {}", False),  # meanwhile a batch would gather
        (3, 1, "", False),
    ],
)
def test_a_run_is_made_on_the_event_loop_where_a_thread_would_gain_nothing(
    milliseconds: float, cores: int, text: str, inline: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    timed = warmup._timed
    monkeypatch.setattr(warmup, "_timed", lambda *run: (timed(*run)[0], milliseconds / 1000))
    models.multiply(tmp_path / "1" / "model.onnx")
    backend = load(artifact(tmp_path / "1", text)._replace(threads=cores))
    assert backend.execution.inline(InferRequest("m", [fp32([[1, 2, 3, 4]])])) is inline


def test_a_run_that_is_long_for_its_input_does_not_hold_the_event_loop(tmp_path: Path) -> None:
    """Warm in microseconds, then 300 ms: the time depends on the value, not on the size."""
    models.count_up(tmp_path / "model.onnx")
    backend = served(tmp_path)

    async def main() -> int:
        request = InferRequest("m", [Tensor("n", Datatype.INT64, np.array([300_000]))])
        run = asyncio.ensure_future(backend(request, NO_DEADLINE))
        iterations = 0
        while not run.done():
            await asyncio.sleep(0)
            iterations += 1
        assert run.result().outputs[0].data.tolist() == [300_000]
        return iterations

    assert asyncio.run(main()) > 10  # a run on the event loop leaves one or two


def test_a_backend_that_does_not_exist_is_unsupported() -> None:
    with pytest.raises(Unsupported, match=r"backend 'nonsense' is not supported.*onnxruntime"):
        find_loader("nonsense")


def test_a_backend_whose_library_is_missing_is_unsupported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = BackendDescriptor("absent", "modelport.gateway.backends.absent", "Absent")
    monkeypatch.setitem(BACKENDS.builtin, "absent", absent)
    with pytest.raises(Unsupported, match="backend 'absent' cannot be imported; ") as caught:
        find_loader("absent")
    assert "/" not in str(caught.value)
    assert "modelport.gateway.backends" not in str(caught.value)
