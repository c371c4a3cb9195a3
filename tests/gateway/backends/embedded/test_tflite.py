"""Embedded TensorFlow Lite: names, sizes that change, instances of their own, and damage."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from ai_edge_litert.tools import flatbuffer_utils

from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.gateway.backend_registry import find_loader
from modelport.gateway.errors import Internal, InvalidArgument, ModelportError
from modelport.gateway.types import NO_DEADLINE, Datatype, InferRequest, Tensor, finished
from tests.gateway.backends.embedded.runtimes import fp32, load, run

TEXT = 'backend: "tflite" '


class TfliteModule(tf.Module):  # type: ignore[misc]
    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, "x")])  # type: ignore[untyped-decorator]
    def double(self, x: Any) -> Any:
        return {"y": x * 2, "z": x + 1}

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, "x")])  # type: ignore[untyped-decorator]
    def positive(self, x: Any) -> Any:
        return {"y": x[:, : tf.reduce_sum(tf.cast(x[0] > 0, tf.int32))], "z": x + 1}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "x")])  # type: ignore[untyped-decorator]
    def text(self, x: Any) -> Any:
        return {"y": tf.identity(x)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder, module = tmp_path_factory.mktemp("saved"), TfliteModule()
    functions = {"one": module.double, "positive": module.positive, "text": module.text}
    contents = {}
    for name, function in functions.items():
        signatures = {"serving_default": function}
        tf.saved_model.save(module, str(folder / name), signatures=signatures)
        contents[name] = tf.lite.TFLiteConverter.from_saved_model(str(folder / name)).convert()
    signatures = {"double": module.double, "again": module.double}
    tf.saved_model.save(module, str(folder / "two"), signatures=signatures)
    converter = tf.lite.TFLiteConverter.from_saved_model(str(folder / "two"), ["double", "again"])
    contents["two"] = converter.convert()
    return contents


@pytest.fixture
def version(tmp_path: Path, files: dict[str, bytes]) -> Path:
    (tmp_path / "model.tflite").write_bytes(files["one"])
    return tmp_path


def refused(version: Path, text: str = TEXT) -> str:
    with pytest.raises(ModelportError) as caught:
        load(version, text)
    assert str(version) not in str(caught.value)
    return str(caught.value)


def test_names_and_shapes_are_the_signatures(version: Path) -> None:
    backend = load(version, TEXT)
    assert [(t.name, list(t.dims)) for t in backend.config.input] == [("x", [4])]
    assert sorted(t.name for t in backend.config.output) == ["y", "z"]
    (z,) = run(backend, fp32([[1] * 4]), outputs=("z",)).outputs
    assert (z.name, z.data.tolist()) == ("z", [[2.0] * 4])


def test_any_batch_may_follow_any_other(version: Path) -> None:
    backend = load(version, TEXT + "max_batch_size: 64")
    for batch in (1, 64, 3, 64, 1):
        (y, _) = run(backend, fp32(np.full((batch, 4), batch))).outputs
        assert y.data.tolist() == [[2.0 * batch] * 4] * batch


def test_an_output_without_elements_is_an_answer(version: Path, files: dict[str, bytes]) -> None:
    (version / "model.tflite").write_bytes(files["positive"])
    backend = load(version, TEXT)
    for sign in (1, -1, 1):
        y, z = run(backend, fp32(np.full((2, 4), sign)), outputs=("y", "z")).outputs
        assert (y.data.shape, y.data.dtype) == ((2, 4 if sign > 0 else 0), np.float32)
        assert z.data.tolist() == [[1.0 + sign] * 4] * 2


def test_an_answer_is_not_written_over_by_the_next_run(version: Path) -> None:
    backend = load(version, TEXT)
    (first, _) = run(backend, fp32([[1] * 4])).outputs
    run(backend, fp32([[9] * 4]))
    assert first.data.tolist() == [[2.0] * 4]


async def test_instances_run_side_by_side_and_never_mix(version: Path) -> None:
    text = TEXT + "max_batch_size: 8 instance_group { count: 3 }"
    backend = load(
        version, text + ' parameters { key: "tflite_num_threads" value { string_value: "1" } }'
    )
    backend._infer._inline_elements = -1  # type: ignore[attr-defined]  # all of it on threads

    async def ask(number: int) -> None:
        data = np.full((number % 8 + 1, 4), number, np.float32)
        request = InferRequest("m", [Tensor("x", Datatype.FP32, data)])
        response = await finished(backend(request, NO_DEADLINE))
        assert np.array_equal(response.outputs[0].data, data * 2)

    await asyncio.gather(*map(ask, range(300)))
    backend.unload()


def test_other_shapes_are_taken_by_name_where_the_interpreter_can(tmp_path: Path) -> None:
    weights = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    spec = tf.TensorSpec([1, 2], tf.float32, "x")
    function = tf.function(lambda x: {"y": tf.linalg.matmul(x, weights)}, input_signature=[spec])
    module = tf.Module()
    tf.saved_model.save(module, str(tmp_path / "saved"), {"serving_default": function})
    converter = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "saved"))
    (tmp_path / "model.tflite").write_bytes(converter.convert())
    backend = load(tmp_path, TEXT)

    def ask(*shape: int) -> Any:
        data = np.ones(shape, np.float32)
        request = InferRequest("m", [Tensor("x", Datatype.FP32, data)])
        request.signature = "serving_default"
        return asyncio.run(backend(request, NO_DEADLINE)).outputs[0].data.tolist()

    for _ in range(2):
        assert ask(3, 2) == [[4.0, 6.0]] * 3
        with pytest.raises(InvalidArgument):
            ask(3, 5)
        assert ask(1, 2) == [[4.0, 6.0]]
    declared = TEXT + 'input { name: "x" data_type: TYPE_FP32 dims: [ 1, 2 ] }'
    assert load(tmp_path, declared).signatures == {}  # type: ignore[attr-defined]


def test_text_goes_through(tmp_path: Path, files: dict[str, bytes]) -> None:
    (tmp_path / "model.tflite").write_bytes(files["text"])
    data = np.array([b"", b"\xff\0x", b"text"], object)
    (y,) = run(
        load(tmp_path, TEXT + "max_batch_size: 0"), Tensor("x", Datatype.BYTES, data)
    ).outputs
    assert y.data.tolist() == data.tolist()


def test_one_of_several_signatures_must_be_named(tmp_path: Path, files: dict[str, bytes]) -> None:
    (tmp_path / "model.tflite").write_bytes(files["two"])
    assert "to one of 'again', 'double'" in refused(tmp_path)
    named = TEXT + 'parameters { key: "TF_SIGNATURE_DEF" value { string_value: "again" } }'
    (y, _) = run(load(tmp_path, named), fp32([[1] * 4])).outputs
    assert y.data.tolist() == [[2.0] * 4]


def test_a_file_without_signatures_is_bound_by_its_tensors_names(
    version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelport.gateway.backends.embedded import tflite

    monkeypatch.setattr(tflite.Interpreter, "get_signature_list", lambda self: {})
    backend = load(version, TEXT)
    (name,) = (tensor.name for tensor in backend.config.input)
    for batch in (1, 3, 2):
        outputs = run(backend, fp32(np.full((batch, 4), 5), name)).outputs
        assert sorted(t.data[0, 0] for t in outputs) == [6.0, 10.0]
        assert outputs[0].data.shape == (batch, 4)


def test_a_damaged_file_is_refused(version: Path, files: dict[str, bytes]) -> None:
    for content in (b"", b"model", files["one"][: len(files["one"]) // 2]):
        (version / "model.tflite").write_bytes(content)
        assert refused(version).startswith("'model.tflite' does not load: ")


def test_a_model_that_is_written_over_while_it_serves_answers_on(version: Path) -> None:
    """A mapped file would change under the interpreter, or end the process."""
    backend = load(version, TEXT)
    (version / "model.tflite").write_bytes(b"")
    (y, _) = run(backend, fp32([[1] * 4])).outputs
    assert y.data.tolist() == [[2.0] * 4]


def test_threads_must_be_a_number(version: Path) -> None:
    text = TEXT + 'parameters { key: "tflite_num_threads" value { string_value: "0" } }'
    with pytest.raises(InvalidArgument, match="'tflite_num_threads' must be a whole number of at"):
        load(version, text)


def test_the_older_runtime_serves_where_litert_is_not(
    version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ai_edge_litert import interpreter

    older = ModuleType("tflite_runtime")
    monkeypatch.setitem(sys.modules, "tflite_runtime", older)
    monkeypatch.setitem(sys.modules, "tflite_runtime.interpreter", interpreter)
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", None)
    monkeypatch.delitem(sys.modules, "modelport.gateway.backends.embedded.tflite", raising=False)
    assert find_loader("tflite").__module__ == "modelport.gateway.backends.embedded.tflite"
    (y, _) = run(load(version, TEXT), fp32([[1] * 4])).outputs
    assert y.data.tolist() == [[2.0] * 4]


@pytest.mark.parametrize("signatures", [True, False])
def test_a_file_that_cannot_be_allocated_at_its_placeholder_shape_is_served(
    tmp_path: Path, signatures: bool
) -> None:
    wanted = tf.TensorSpec([None, None], tf.float32, "x")
    made = tf.function(lambda x: {"y": tf.reduce_sum(tf.reshape(x, [-1, 4]), 1)})
    convert = tf.lite.TFLiteConverter.from_concrete_functions
    content = convert([made.get_concrete_function(wanted)]).convert()
    if not signatures:
        model = flatbuffer_utils.read_model_from_bytearray(bytearray(content))
        model.signatureDefs = []
        content = flatbuffer_utils.convert_object_to_bytearray(model)
    (tmp_path / "model.tflite").write_bytes(content)
    backend = load(tmp_path, TEXT)
    (name,) = [each.name for each in backend.config.input]
    for rows in (2, 3, 1):
        answer = run(backend, fp32(np.ones((rows, 4)), name))
        assert answer.outputs[0].data.tolist() == [4.0] * rows
    with pytest.raises(Internal, match="inference failed"):
        run(backend, fp32(np.ones((1, 3)), name))
    assert run(backend, fp32(np.ones((1, 4)), name)).outputs[0].data.tolist() == [4.0]
    backend.unload()
