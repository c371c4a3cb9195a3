"""Keras files and SavedModels are read safely, say what they take, and reach every format."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from modelport.exporters import api
from modelport.exporters.formats import tensorflow_onnx
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import FORMATS
from modelport.exporters.keras_ports import find_port
from modelport.exporters.loaded_model import Source
from modelport.exporters.requests.random_inputs import draw
from modelport.exporters.runtime.tensorflow_runtime import keras, tf
from modelport.exporters.sources import SourceRequest, input_bounds, tensorflow
from modelport.gateway.errors import IntegrityError, ModelportError, Unsupported, UsageError
from modelport.gateway.types import Array, Axis, Datatype, ModelSignature, TensorSpec
from tests import half_plus_two
from tests.keras_models import functional, layers, ops, read, saved, saved_graph, scorer
from tests.thorough import thorough


@pytest.fixture(scope="module")
def scorer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(scorer, tmp_path_factory.mktemp("keras") / "card scorer.keras")


@pytest.fixture(scope="module")
def source(scorer_file: Path) -> Source:
    return read(scorer_file, max_batch_size=4)


@pytest.fixture
def saved_model(tmp_path: Path) -> Callable[..., Path]:
    return functools.partial(saved_graph, tmp_path / "saved")


def test_a_keras_model_says_itself_what_it_takes_and_gives(source: Source) -> None:
    assert source.spec.name == "card_scorer"
    assert source.signature.max_batch_size == 4
    amount, tokens = source.signature.inputs
    assert (amount.name, amount.datatype, amount.dims) == ("amount", Datatype.FP32, (3,))
    assert (tokens.name, tokens.datatype, tokens.dims) == ("tokens", Datatype.INT32, ("tokens_0",))
    assert [(o.name, o.dims) for o in source.signature.outputs] == [("kind", (5,)), ("risk", (1,))]
    assert source.parameter_count == 20 * 4 + 7 * 6 + 6 + 6 * 5 + 5 + 6 + 1
    assert source.origins[0].name == "card scorer.keras"


def convolution() -> Any:
    """Layers that Keras 2 had, too."""
    first = [keras.Input((8, 3)), layers.Conv1D(4, 3, activation="relu"), layers.GRU(3)]
    return keras.Sequential([*first, layers.BatchNormalization(), layers.Dense(2, "softmax")])


@pytest.mark.parametrize("suffix", [".h5", ".hdf5"])
def test_a_whole_model_in_hdf5_answers_as_the_model_that_was_saved(
    tmp_path: Path, suffix: str
) -> None:
    keras.utils.set_random_seed(0)
    model = convolution()
    path = saved(lambda: model, tmp_path / "a.h5").rename(tmp_path / f"a{suffix}")
    rows = np.random.default_rng(0).normal(size=(2, 8, 3)).astype(np.float32)
    source = read(path)
    (name,) = (spec.name for spec in source.signature.inputs)
    (found,) = source.reference({name: rows}).values()
    assert np.allclose(found, model(rows), atol=1e-6)


def test_a_class_that_a_model_in_hdf5_lacks_is_named_with_the_remedy(tmp_path: Path) -> None:
    class TwiceInput(layers.Layer):  # type: ignore[name-defined,misc]
        def call(self, x: Any) -> Any:
            return 2 * x

    build = functools.partial(keras.Sequential, [keras.Input((3,)), TwiceInput()])
    with pytest.raises(Unsupported, match=r"class 'TwiceInput'.*--custom-objects MODULE"):
        read(saved(build, tmp_path / "a.h5"))


def test_the_size_of_a_vocabulary_and_the_length_of_an_axis_are_found(source: Source) -> None:
    tokens = source.signature.inputs[1]
    # Keras counts a negative number from the end, as NumPy does.
    assert (tokens.minimum, tokens.maximum) == (-20, 19)
    assert source.signature.axes == {"tokens_0": Axis("tokens_0", 1, None)}


@pytest.mark.parametrize("name", ["tflite", "onnx", thorough("savedmodel")])
def test_an_artifact_computes_what_the_keras_model_computes(
    source: Source, tmp_path: Path, name: str
) -> None:
    row, path = FORMATS.builtin[name], tmp_path / FORMATS.builtin[name].platform.default_filename
    row.export(source, path, ExportTarget())
    session = row.open_session(path)
    assert sorted(session.inputs) == ["amount", "tokens"]
    assert sorted(session.outputs) == ["kind", "risk"]
    for batch, length in ((1, 1), (1, 9), (4, 5)):
        inputs = draw(source.signature, batch, {"tokens_0": length}, np.random.default_rng(1))
        expected, actual = source.reference(inputs), session(inputs)
        for output in expected:
            assert actual[output].shape == expected[output].shape
            np.testing.assert_allclose(actual[output], expected[output], rtol=1e-5, atol=1e-6)


def test_an_onnx_file_has_the_names_of_the_signatures_axes(source: Source, tmp_path: Path) -> None:
    import onnx

    tensorflow_onnx.export(source, tmp_path / "model.onnx", ExportTarget())
    graph = onnx.load(tmp_path / "model.onnx").graph
    dims = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert dims["tokens"] == ["batch", "tokens_0"]
    assert dims["kind"] == ["batch", 5]


@pytest.mark.thorough
def test_weights_that_go_around_the_onnx_converter_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorflow_onnx, "LARGE_CONSTANT_BYTES", 1 << 10)
    image = keras.Input((8, 8, 8), name="image")
    tokens = keras.Input((None,), dtype="int64", name="tokens")
    seen = layers.Flatten()(layers.Conv2D(8, 3, strides=2)(image))
    words = layers.LSTM(16)(layers.Embedding(70, 16)(tokens))
    both = layers.Dense(30, name="both")(layers.Concatenate()([seen, words]))
    source = read(saved(functional([image, tokens], both), tmp_path / "a.keras"))
    row, path = FORMATS.builtin["onnx"], tmp_path / "model.onnx"
    row.export(source, path, ExportTarget())
    inputs = draw(source.signature, 3, {"tokens_0": 6}, np.random.default_rng(0))
    actual = row.open_session(path)(inputs)["both"]
    np.testing.assert_allclose(actual, source.reference(inputs)["both"], rtol=1e-4, atol=1e-5)


def test_int8_weights_of_a_keras_model_are_int8_in_onnx(tmp_path: Path) -> None:
    x = keras.Input((16,), name="x")
    model = functional(x, layers.Dense(4, name="y")(layers.Dense(32, activation="relu")(x)))
    path = saved(model, tmp_path / "net.keras")
    (tmp_path / "out").mkdir()
    api.export(path, format="onnx", quantize="int8", samples=8, output=tmp_path / "out")
    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    assert {t.data_type for t in graph.initializer if len(t.dims) == 2} == {onnx.TensorProto.INT8}


@pytest.mark.parametrize("opset", [12, 19])
def test_an_opset_that_tf2onnx_does_not_know_is_unsupported(
    source: Source, tmp_path: Path, opset: int
) -> None:
    with pytest.raises(Unsupported, match=f"--opset {opset} .* from TensorFlow; use 13 to 18"):
        tensorflow_onnx.export(source, tmp_path / "model.onnx", ExportTarget(opset=opset))


def test_an_operator_that_onnx_has_not_is_named(
    saved_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = saved_model(lambda x: tf.linalg.svd(tf.expand_dims(x, 1))[0])
    with pytest.raises(Unsupported, match=r"ONNX has no Svd.*use --format savedmodel"):
        tensorflow_onnx.export(read(path), tmp_path / "model.onnx", ExportTarget())
    assert not (tmp_path / "model.onnx").exists()


def test_names_that_formats_cannot_carry_are_made_plain_and_stay_apart(tmp_path: Path) -> None:
    one, two = keras.Input((2,), name="1 st.amount"), keras.Input((2,), name="1_st_amount")
    found = read(saved(functional([one, two], one + two), tmp_path / "a.keras")).signature
    assert [spec.name for spec in found.inputs] == ["input_1_st_amount", "input_1_st_amount_1"]


def test_a_fixed_first_dimension_is_no_batch(tmp_path: Path) -> None:
    whole = keras.Input(batch_shape=(2, 3), name="x")
    found = read(saved(functional(whole, layers.Dense(4)(whole)), tmp_path / "a.keras")).signature
    assert found.max_batch_size == 0
    assert (found.inputs[0].dims, found.outputs[0].dims) == ((2, 3), (2, 4))


def test_one_number_per_row_travels_as_a_vector_of_one(tmp_path: Path) -> None:
    amount = keras.Input((), name="amount")
    found = read(saved(functional(amount, amount * 2), tmp_path / "a.keras"))
    spec = found.signature.inputs[0]
    assert (spec.dims, spec.reshape) == ((1,), ())
    (doubled,) = found.reference({"amount": np.ones(3, np.float32)}).values()
    assert doubled.tolist() == [2, 2, 2]


def test_dimensions_that_must_be_equal_are_one_axis(tmp_path: Path) -> None:
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    weights = keras.Input((None,), name="weights")
    mixed = layers.Embedding(9, 2)(tokens) * ops.expand_dims(weights, -1)
    found = read(saved(functional([tokens, weights], mixed), tmp_path / "a.keras")).signature
    assert [spec.dims for spec in found.inputs] == [("axis_0",), ("axis_0",)]


def test_the_smallest_image_and_the_longest_text_are_found(tmp_path: Path) -> None:
    image = keras.Input((None, 40, 3), name="image")
    text = keras.Input((None,), dtype="int64", name="text")
    seen = layers.GlobalMaxPooling2D()(layers.Conv2D(2, 5)(image))
    places = layers.Embedding(11, 2)(ops.cumsum(ops.ones_like(text), axis=1) - 1)
    both = ops.concatenate([seen, ops.mean(places, axis=1)], axis=-1)
    found = read(saved(functional([image, text], both), tmp_path / "a.keras")).signature
    assert found.axes["image_0"] == Axis("image_0", 5, None)
    assert found.axes["text_0"] == Axis("text_0", 1, 11)


def test_a_saved_model_is_served_by_its_own_signature(
    saved_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = read(saved_model(lambda x: tf.reduce_sum(x, axis=1)))
    assert [(i.name, i.dims) for i in source.signature.inputs] == [("x", (3,))]
    output = source.signature.outputs[0]
    assert (output.name, output.dims, output.reshape) == ("y", (1,), ())
    row = FORMATS.builtin["savedmodel"]
    row.export(source, tmp_path / "again", ExportTarget())
    inputs = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    assert row.open_session(tmp_path / "again")(inputs)["y"].tolist() == [3.0, 12.0]


def test_a_saved_model_may_have_variables_tables_random_numbers_and_loops(
    saved_model: Callable[..., Path],
) -> None:
    initial = tf.lookup.KeyValueTensorInitializer(tf.constant([0, 1]), tf.constant([5.0, 6.0]))
    table = tf.lookup.StaticHashTable(initial, 0.0)
    state = tf.Variable(2.0)

    def function(x: Any) -> Any:
        looked_up = table.lookup(tf.cast(x, tf.int32))
        noise = tf.random.uniform([3]) * 0
        looped = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y + state), [0, x])[1]
        return looked_up + noise + tf.cond(tf.reduce_sum(x) > 0, lambda: looped, lambda: x)

    path = saved_model(function, table=table, state=state)
    result = read(path).reference({"x": np.ones((1, 3), np.float32)})["y"]
    assert result.tolist() == [[13.0, 13.0, 13.0]]


def test_the_only_signature_of_a_saved_model_is_exported_whatever_its_name(
    saved_model: Callable[..., Path],
) -> None:
    source = read(saved_model(lambda x: x + 1, name="predict"))
    assert source.reference({"x": np.zeros((1, 3), np.float32)})["y"].tolist() == [[1, 1, 1]]


def test_a_signature_is_chosen_by_its_name(tmp_path: Path) -> None:
    def plus(number: int) -> Any:
        spec = tf.TensorSpec([None, 3], tf.float32, name="x")
        return tf.function(lambda x: {"y": x + number}, [spec], autograph=False)

    signatures = {"serving_default": plus(0), "one": plus(1), "two": plus(2)}
    tf.saved_model.save(tf.Module(), str(tmp_path / "plus"), signatures=signatures)
    source = read(tmp_path / "plus", task="two")
    assert source.reference({"x": np.zeros((1, 3), np.float32)})["y"].tolist() == [[2, 2, 2]]
    assert "--signature one" in source.notices[0]
    with pytest.raises(UsageError, match=r"no signature 'no', only one, .*--signature"):
        read(tmp_path / "plus", task="no")
    with pytest.raises(UsageError, match="--signature is for a SavedModel"):
        api.export(tmp_path / "plus" / "saved_model.pb", format="onnx", signature="no")


def test_a_model_that_does_not_say_what_it_takes_is_unsupported(tmp_path: Path) -> None:
    path = saved(lambda: keras.Sequential([layers.Dense(2)]), tmp_path / "a.keras")
    with pytest.raises(Unsupported, match=r"begin it with keras\.Input"):
        read(path)


def test_a_subclass_of_a_model_is_refused_with_the_way_out(tmp_path: Path) -> None:
    class Own(keras.Model):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x

    def build() -> Any:
        model = Own()
        model(np.zeros((1, 3), np.float32))
        return model

    with pytest.raises(IntegrityError, match=r"Own' while loading.*model\.export\('folder'\)"):
        read(saved(build, tmp_path / "a.keras"))


def test_a_model_that_holds_its_architecture_takes_no_other(scorer_file: Path) -> None:
    with pytest.raises(UsageError, match="omit --model"):
        read(scorer_file, model="fraud")


@pytest.mark.thorough
def test_a_converted_port_is_a_model_like_any_other(tmp_path: Path) -> None:
    kwargs = {"vocab_size": 32, "d_model": 8, "nhead": 2, "num_layers": 1, "dim_feedforward": 8}
    port = find_port("modelport.exporters.keras_ports.fraud:PORT")
    build = functools.partial(port.build, {**kwargs, "max_positions": 12}, "float32")
    found = read(saved(build, tmp_path / "fraud.keras")).signature
    tokens = next(spec for spec in found.inputs if spec.name == "tokens")
    assert (tokens.minimum, tokens.maximum) == (-32, 31)
    assert list(found.axes.values()) == [Axis("tokens_0", 1, 12)]
    assert found.outputs[0].name == "probability"


def test_signatures_that_are_left_out_are_named(tmp_path: Path) -> None:
    half_plus_two.save(tmp_path / "half")
    left_out = ["classify_x_to_y", "regress_x2_to_y3", "regress_x_to_y", "regress_x_to_y2"]
    notices = read(tmp_path / "half").notices
    assert [re.findall("'(.+?)'", each)[0] for each in notices] == left_out


def test_a_saved_model_that_the_gateway_serves_is_not_called_damaged(tmp_path: Path) -> None:
    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default(), v1.Session(graph=graph) as session:
        x = v1.placeholder(tf.float32, [None, 4], "x")
        signature = half_plus_two.signature({"a": x, "b": x}, {"y": x * 2.0}, "predict")
        builder = v1.saved_model.Builder(str(tmp_path / "twice"))
        builder.add_meta_graph_and_variables(session, ["serve"], {"serving_default": signature})
        builder.save()
    words = (
        "cannot call 'twice' as a function .*; serve it without an export: modelport serve twice"
    )
    with pytest.raises(Unsupported, match=words):
        read(tmp_path / "twice")
    (tmp_path / "twice" / "saved_model.pb").write_bytes(b"x")
    with pytest.raises(IntegrityError):
        read(tmp_path / "twice")


def long_reference(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """A model that needs 100 rows at least, as one with a long kernel."""
    if inputs["x"].shape[1] < 100:
        raise ValueError(
            "{{function_node __f}} size would be negative: -98 [Op:Conv2D] name: \x1b[0m"
        )
    return {"y": inputs["x"].mean(axis=1)}


def settled(*flags: str) -> ModelSignature:
    x, y = TensorSpec("x", Datatype.FP32, (-1, 3)), TensorSpec("y", Datatype.FP32, (3,))
    signature = input_bounds.declared(ModelSignature((x,), (y,), 8), flags)
    return input_bounds.settle(signature, long_reference)


def test_the_reason_that_keras_writes_in_bold_is_told_alone() -> None:
    said = ValueError(
        "Exception encountered when calling X.call().\n\n\x1b[1mrank 3\x1b[0m\n\nargs"
    )
    assert input_bounds._said([said]) == "rank 3"


def test_a_model_that_needs_larger_sizes_than_are_tried_takes_them_from_input() -> None:
    with pytest.raises(Unsupported, match=r"size would be negative: -98\); declare") as refused:
        settled()
    remedy = re.search(r"--input '([^']+)'", str(refused.value))
    assert remedy is not None
    assert settled(remedy[1]).inputs[0].dims == (512, 3)
    signature = settled("x:FP32[rows=100..130,3]")
    assert signature.inputs[0].dims == ("rows", 3)
    assert (signature.axes["rows"].minimum, signature.axes["rows"].maximum) == (100, 130)
    for wrong, said in (
        ("x:FP32[rows=99..130,3]", "does not run at any size"),
        ("x:FP32[512,4]", r"which declares x:FP32\[-1,3\]"),
        ("x:INT64[512,3]", r"which declares x:FP32\[-1,3\]"),
        ("z:FP32[512,3]", "'z' is not an input of the model; its inputs are x"),
    ):
        with pytest.raises(ModelportError, match=said):
            settled(wrong)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' own
def test_a_keras_model_with_a_long_kernel_is_exported_at_the_sizes_of_input(
    tmp_path: Path,
) -> None:
    x = keras.Input((None, 3), name="x")
    y = layers.GlobalAveragePooling1D(name="y")(layers.Conv1D(2, 100)(x))
    path = saved(functional(x, y), tmp_path / "long.keras")
    with pytest.raises(Unsupported, match="Computed output size would be negative"):
        tensorflow.load(SourceRequest(path))
    (tmp_path / "out").mkdir()
    declared = ["x:FP32[rows=100..130,3]"]
    api.export(path, format="onnx", input=declared, samples=8, output=tmp_path / "out")
    assert (tmp_path / "out" / "model.onnx").is_file()
