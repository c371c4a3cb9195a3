"""Embedded TensorFlow: every datatype, signatures by name, damage, and nothing left behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.gateway.errors import Internal, InvalidArgument, ModelportError
from modelport.gateway.types import NUMPY_DTYPES, Datatype, Tensor
from tests.gateway.backends.embedded.runtimes import fp32, load, run

TEXT = 'platform: "tensorflow_savedmodel" '
WORDS = {
    Datatype.BOOL: tf.bool, Datatype.UINT8: tf.uint8, Datatype.UINT16: tf.uint16,
    Datatype.UINT32: tf.uint32, Datatype.UINT64: tf.uint64, Datatype.INT8: tf.int8,
    Datatype.INT16: tf.int16, Datatype.INT32: tf.int32, Datatype.INT64: tf.int64,
    Datatype.FP16: tf.float16, Datatype.FP32: tf.float32, Datatype.FP64: tf.float64,
    Datatype.BF16: tf.bfloat16, Datatype.BYTES: tf.string,
}  # fmt: skip


class SavedModelModule(tf.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.fill([4], 2.0))
        keys, values = tf.constant([b"a", b"b"]), tf.constant([1, 2], tf.int64)
        table = tf.lookup.KeyValueTensorInitializer(keys, values)
        self.table = tf.lookup.StaticHashTable(table, -1)


def signature(function: Any, *specs: Any) -> Any:
    return tf.function(function).get_concrete_function(*specs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version whose model has a signature for each datatype, and more."""
    version = tmp_path_factory.mktemp("saved") / "1"
    module = SavedModelModule()
    x = tf.TensorSpec([None, 4], tf.float32, "x")
    signatures = {
        "serving_default": signature(lambda x: {"y": x * module.weight, "z": x + 1}, x),
        "lookup": signature(
            lambda key: {"value": module.table.lookup(key)}, tf.TensorSpec([None], tf.string, "key")
        ),
        "ranked": signature(lambda x: {"y": x}, tf.TensorSpec(None, tf.float32, "x")),
        "picky": signature(
            lambda i: {"y": tf.gather(module.weight, i)}, tf.TensorSpec([None], tf.int64, "i")
        ),
        **{
            datatype.value: signature(
                lambda x: {"y": tf.identity(x)}, tf.TensorSpec([None, 4], word, "x")
            )
            for datatype, word in WORDS.items()
        },
    }
    tf.saved_model.save(module, str(version / "model.savedmodel"), signatures=signatures)
    return version


def named(key: str) -> str:
    return TEXT + f'parameters {{ key: "TF_SIGNATURE_DEF" value {{ string_value: "{key}" }} }}'


def refused(version: Path, text: str) -> str:
    with pytest.raises(ModelportError) as caught:
        load(version, text)
    assert str(version.parent) not in str(caught.value)
    return str(caught.value)


def test_a_vocabulary_that_the_model_brings_is_read(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("no\nyes\n")
    module = tf.Module()
    keys, values = tf.lookup.TextFileIndex.WHOLE_LINE, tf.lookup.TextFileIndex.LINE_NUMBER
    initializer = tf.lookup.TextFileInitializer(
        str(tmp_path / "words.txt"), tf.string, keys, tf.int64, values
    )
    module.table = tf.lookup.StaticHashTable(initializer, -1)
    x = tf.TensorSpec([None], tf.string, "x")
    tf.saved_model.save(
        module,
        str(tmp_path / "m" / "1" / "model.savedmodel"),
        signatures=signature(lambda x: {"y": module.table.lookup(x)}, x),
    )
    (tmp_path / "words.txt").unlink()
    backend = load(tmp_path / "m" / "1", TEXT)
    (y,) = run(backend, Tensor("x", Datatype.BYTES, np.array([b"yes", b"?"], object))).outputs
    assert y.data.tolist() == [1, -1]


@pytest.mark.parametrize("datatype", list(Datatype))
def test_every_datatype_comes_back_bit_by_bit(datatype: Datatype, saved: Path) -> None:
    backend = load(saved, named(datatype.value))
    if datatype is Datatype.BYTES:
        data = np.array([[b"", b"text", b"\xff\0", b"x" * 100]], object)
    else:
        size = NUMPY_DTYPES[datatype].itemsize * 4
        bits = bytes([0, 1] * (size // 2)) if datatype is Datatype.BOOL else bytes(range(size))
        data = np.frombuffer(b"\0" + bits, NUMPY_DTYPES[datatype], 4, 1).reshape(1, 4)
    (y,) = run(backend, Tensor("x", datatype, data)).outputs
    assert (y.datatype, y.data.dtype, y.data.shape) == (datatype, NUMPY_DTYPES[datatype], (1, 4))
    assert y.data.tolist() == data.tolist()
    backend.unload()


def test_the_signature_tells_names_types_and_shapes(saved: Path) -> None:
    backend = load(saved, TEXT)
    config = backend.config
    assert [(t.name, list(t.dims)) for t in config.input] == [("x", [4])]
    assert sorted(t.name for t in config.output) == ["y", "z"]
    assert [t.name for t in run(backend, fp32([[1] * 4]), outputs=("z",)).outputs] == ["z"]
    both = run(backend, fp32([[1] * 4]), outputs=("z", "y")).outputs
    assert [(t.name, t.data[0, 0]) for t in both] == [("z", 2.0), ("y", 2.0)]


def test_tables_are_initialised(saved: Path) -> None:
    key = Tensor("key", Datatype.BYTES, np.array([b"b", b"no"], object))
    (value,) = run(load(saved, named("lookup") + "max_batch_size: 0"), key).outputs
    assert value.data.tolist() == [2, -1]


def test_a_signature_that_is_not_there_is_answered_with_those_that_are(saved: Path) -> None:
    reason = refused(saved, named("classify"))
    assert "has no signature 'classify'" in reason
    assert "set the parameter TF_SIGNATURE_DEF to one of 'BF16'" in reason


def test_an_input_of_unknown_rank_is_a_vector_unless_it_is_declared(saved: Path) -> None:
    backend = load(saved, named("ranked"))
    assert [list(t.dims) for t in backend.config.input] == [[-1]]
    assert backend.config.max_batch_size == 0
    (y,) = run(backend, fp32([1, 2, 3])).outputs
    assert y.data.tolist() == [1, 2, 3]
    declared = named("ranked") + ' input { name: "x" data_type: TYPE_FP32 dims: [ 2, 2 ] }'
    backend = load(saved, declared)
    (y,) = run(backend, fp32([[1, 2], [3, 4]])).outputs
    assert y.data.tolist() == [[1, 2], [3, 4]]
    assert list(backend.config.output[0].dims) == [-1, -1]


def test_without_serving_default_another_signature_is_the_default(tmp_path: Path) -> None:
    x = tf.TensorSpec([None], tf.float32, "x")
    module = tf.Module()
    signatures = {"second": signature(lambda x: {"y": x * 2}, x)}
    signatures["first"] = signature(lambda x: {"y": x * 1}, x)
    version = tmp_path / "m" / "1"
    tf.saved_model.save(module, str(version / "model.savedmodel"), signatures=signatures)
    (y,) = run(load(version, TEXT + "max_batch_size: 0"), fp32([3.0])).outputs
    assert y.data.tolist() == [3.0]


def test_what_the_graph_raises_is_an_internal_error_without_paths(saved: Path) -> None:
    backend = load(saved, named("picky"))
    with pytest.raises(Internal, match=r"inference failed: .*9 is not in \[0, 4\)") as caught:
        run(backend, Tensor("i", Datatype.INT64, np.array([9])))
    assert "/" not in str(caught.value)
    (y,) = run(backend, Tensor("i", Datatype.INT64, np.array([3]))).outputs
    assert y.data.tolist() == [2.0]


@pytest.mark.parametrize(
    "damage", ["no graph", "no variables", "flipped weights", "truncated index", "file"]
)
def test_a_damaged_savedmodel_is_refused_with_the_reason(
    damage: str, saved: Path, tmp_path: Path
) -> None:
    version = tmp_path / "secret" / "m" / "1"
    folder = Path(shutil.copytree(saved, version)) / "model.savedmodel"
    weights = folder / "variables" / "variables.data-00000-of-00001"
    if damage == "no graph":
        (folder / "saved_model.pb").unlink()
    elif damage == "no variables":
        shutil.rmtree(folder / "variables")
    elif damage == "flipped weights":
        weights.write_bytes(bytes(byte ^ 0xFF for byte in weights.read_bytes()))
    elif damage == "truncated index":
        index = folder / "variables" / "variables.index"
        index.write_bytes(index.read_bytes()[:-20])
    else:
        shutil.rmtree(folder)
        folder.write_bytes(b"model")
    reason = refused(version, TEXT)
    assert reason.startswith("'model.savedmodel' does not load: ")
    assert "secret" not in reason


def test_threads_are_what_the_parameters_say(saved: Path) -> None:
    text = TEXT + "".join(
        f' parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in (("TF_NUM_INTRA_THREADS", "1"), ("TF_NUM_INTER_THREADS", "2"))
    )
    (y, _) = run(load(saved, text), fp32([[1] * 4])).outputs
    assert y.data.tolist() == [[2.0] * 4]
    with pytest.raises(InvalidArgument, match="'TF_NUM_INTRA_THREADS' must be a whole number"):
        load(saved, text.replace('"1"', '"many"'))
