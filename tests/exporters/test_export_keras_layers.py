"""Keras models of many kinds of layers and datatypes compute the same as artifacts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelport.exporters import api
from modelport.exporters.errors import ParityError
from modelport.exporters.formats import built_in_graph
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import FORMATS
from modelport.exporters.loaded_model import Source
from modelport.exporters.proof import parity
from modelport.exporters.requests import triton_warmup
from modelport.exporters.requests.random_inputs import Fill, draw, texts
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.tensorflow_runtime import keras, tf
from modelport.gateway.errors import Unsupported, UsageError
from modelport.gateway.repository import config
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec
from tests.keras_models import layers, read, saved, saved_graph
from tests.thorough import thorough

STEPS = 3
OWN_MODELS = """
import keras

@keras.saving.register_keras_serializable()
class Scorer(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = keras.layers.Embedding(9, 4)
        self.dense = keras.layers.Dense(2)

    def call(self, inputs, training=False):
        found = keras.ops.mean(self.embedding(inputs["tokens"]), axis=1)
        return {"score": self.dense(keras.ops.concatenate([found, inputs["price"]], -1))}

@keras.saving.register_keras_serializable()
class Sum(keras.Model):
    def call(self, first, second):
        return first + keras.ops.sum(second, axis=1)
"""


def recurrent() -> Any:
    """Layers whose loops write lists: with a mask, in both directions, with states, of images."""
    x = keras.Input((STEPS, 4), name="x")
    masked = layers.Masking(0.0)(x)
    both = layers.Bidirectional(layers.LSTM(2, return_sequences=True), merge_mode="ave")(masked)
    dropped = layers.GRU(2, reset_after=False, recurrent_dropout=0.5)(both)
    cells = layers.RNN([layers.GRUCell(2), layers.SimpleRNNCell(3)], go_backwards=True)(masked)
    images = layers.ConvLSTM1D(2, 2)(layers.Reshape((STEPS, 4, 1))(x))
    _, state = layers.SimpleRNN(2, return_state=True)(x)
    return keras.Model(x, layers.Concatenate()([dropped, cells, layers.Flatten()(images), state]))


def exported(source: Source, tmp_path: Path, name: str) -> Any:
    row, path = FORMATS.builtin[name], tmp_path / FORMATS.builtin[name].platform.default_filename
    row.export(source, path, ExportTarget())
    return row.open_session(path)


@pytest.mark.thorough
def test_loops_over_time_are_exported_to_tflite(tmp_path: Path) -> None:
    source = read(saved(recurrent, tmp_path / "recurrent.keras"))
    session = exported(source, tmp_path, "tflite")
    for batch in (1, 3):
        x = np.random.default_rng(batch).standard_normal((batch, STEPS, 4)).astype(np.float32)
        x[0, -1] = 0  # masked
        (expected,), (actual,) = source.reference({"x": x}).values(), session({"x": x}).values()
        np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["onnx", thorough("savedmodel"), thorough("tflite")])
def test_seeds_that_no_answer_uses_and_constants_in_layers_are_no_obstacle(
    tmp_path: Path, name: str
) -> None:
    def build() -> Any:
        normalization = layers.Normalization()
        normalization.adapt(np.arange(8, dtype=np.float32).reshape(4, 2))
        x = keras.Input((STEPS, 2), name="x")
        return keras.Model(x, layers.GRU(2, dropout=0.5, recurrent_dropout=0.5)(normalization(x)))

    source = read(saved(build, tmp_path / "model.keras"))
    x = {"x": np.full((2, STEPS, 2), 5, np.float32)}
    (expected,) = source.reference(x).values()
    (actual,) = exported(source, tmp_path, name)(x).values()
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def tabular(vocabulary: list[str]) -> Callable[[], Any]:
    """A table of a text, a category and a number."""

    def build() -> Any:
        text = keras.Input((), dtype="string", name="text")
        kind = keras.Input((1,), dtype="string", name="kind")
        price = keras.Input((1,), name="price")
        words = layers.TextVectorization(vocabulary=vocabulary, output_mode="multi_hot")(text)
        kinds = layers.StringLookup(vocabulary=vocabulary)
        found = layers.Flatten()(layers.Embedding(kinds.vocabulary_size(), 2)(kinds(kind)))
        back = layers.StringLookup(vocabulary=vocabulary, invert=True)(kinds(kind))
        score = layers.Dense(2)(layers.Concatenate()([words, found, price]))
        return keras.Model([text, kind, price], {"score": score, "known": back})

    return build


def test_texts_are_taken_answered_and_proven_in_a_saved_model(tmp_path: Path) -> None:
    source = read(saved(tabular(["red", "green", "blue"]), tmp_path / "table.keras"))
    datatypes = {spec.name: spec.datatype for spec in source.signature.inputs}
    assert datatypes == {"text": Datatype.BYTES, "kind": Datatype.BYTES, "price": Datatype.FP32}
    session = exported(source, tmp_path, "savedmodel")
    row = {
        "text": np.array([b"Red blue"], object),
        "kind": np.array([[b"red"]], object),
        "price": np.float32([[2]]),
    }
    assert session(row)["known"].tolist() == [[b"red"]]
    limits = {"samples": 8, "seed": 0, "atol": 1e-5, "rtol": 1e-4}
    assert parity.check(source, session, **limits).samples >= 8
    other = read(saved(tabular(["red", "blue", "green"]), tmp_path / "other.keras"))
    with pytest.raises(ParityError, match="differs from the checkpoint"):
        parity.check(replace(other, spec=source.spec), session, **limits)


@pytest.mark.thorough
def test_a_model_of_texts_is_published(tmp_path: Path) -> None:
    path = saved(tabular(["red", "green", "blue"]), tmp_path / "table.keras")
    wanted = {"format": "savedmodel", "repository": tmp_path / "repository", "samples": 8}
    (done,) = api.export(path, **wanted)
    assert done.version == 1


def test_a_text_for_each_row_warms_a_model_up(tmp_path: Path) -> None:
    spec = TensorSpec("text", Datatype.BYTES, (1,), reshape=())
    output = TensorSpec("length", Datatype.INT32, (1,), reshape=())
    signature = ModelSignature((spec,), (output,), 4)
    wanted = config.build("lengths", FORMATS.builtin["savedmodel"].platform, signature)
    triton_warmup.add(wanted, tmp_path, triton_warmup.requests(signature, draw, 0))
    assert [dict(each.inputs)["text"].dims for each in wanted.model_warmup] == [[1], [1]]


def test_edges_of_texts_are_none_and_many_words() -> None:
    drawn = {fill: texts((2, 3), np.random.default_rng(0), fill) for fill in Fill}
    assert set(drawn[Fill.MINIMUM].flat) == {b""}
    assert min(map(len, drawn[Fill.MAXIMUM].flat)) > 80
    assert len(set(drawn[Fill.CONSTANT].flat)) == 1
    assert len(set(drawn[Fill.RANDOM].flat)) > 3
    assert all(drawn[Fill.RANDOM].flat)


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_models.py").write_text(OWN_MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    with quiet():
        return importlib.import_module("own_models")


def test_a_subclass_takes_what_its_first_call_took(tmp_path: Path, own_models: Any) -> None:
    def build() -> Any:
        model = own_models.Scorer()
        model({"tokens": np.zeros((1, 5), np.int32), "price": np.zeros((1, 1), np.float32)})
        return model

    path = saved(build, tmp_path / "scorer.keras")
    declared = ("tokens:INT32[length=1..7]",)
    source = read(path, model="own_models", inputs=declared)
    found = {spec.name: (spec.datatype, spec.dims) for spec in source.signature.inputs}
    assert found == {"tokens": (Datatype.INT32, ("length",)), "price": (Datatype.FP32, (1,))}
    tokens, price = np.array([[1, 2], [3, 4]], np.int32), np.ones((2, 1), np.float32)
    inputs = {"tokens": tokens, "price": price}
    with quiet():
        expected = keras.saving.load_model(path)(inputs)["score"]
    (actual,) = source.reference(inputs).values()
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert any("tokens" in each for each in read(path, model="own_models").notices)
    assert "tokens" not in source.notices[0]


def test_a_subclass_may_take_several_arguments(tmp_path: Path, own_models: Any) -> None:
    def build() -> Any:
        model = own_models.Sum()
        model(np.zeros((1, 2), np.float32), np.zeros((1, 3, 2), np.float32))
        return model

    path = saved(build, tmp_path / "sum.keras")
    with pytest.raises(UsageError, match="--input 'second:FP32"):
        read(path, model="own_models")
    source = read(path, model="own_models", inputs=["second:FP32[3,2]"])
    inputs = {"first": np.ones((1, 2), np.float32), "second": np.ones((1, 3, 2), np.float32)}
    (answer,) = source.reference(inputs).values()
    assert answer.tolist() == [[4, 4]]


def test_a_layer_that_keeps_its_state_is_refused(tmp_path: Path) -> None:
    def build() -> Any:
        x = keras.Input(batch_shape=(2, STEPS, 2))
        return keras.Model(x, layers.LSTM(2, stateful=True, name="memory")(x))

    with pytest.raises(Unsupported, match="'memory' keeps its state"):
        read(saved(build, tmp_path / "stateful.keras"))


def test_the_lists_of_a_saved_model_have_the_size_of_the_batch_in_tflite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, STEPS, 2], tf.float32, name="x")])  # type: ignore[untyped-decorator]
    def sums(x: Any) -> Any:
        found = tf.TensorArray(tf.float32, STEPS, element_shape=[None, 2])
        total = tf.zeros_like(x[:, 0])
        for step in tf.range(STEPS):
            total += x[:, step]
            found = found.write(step, total)
        return {"y": found.stack()[-1]}

    with quiet():
        module = tf.Module()
        module.serve = sums
        tf.saved_model.save(module, str(tmp_path / "sums"), signatures=sums)
    source = read(tmp_path / "sums")
    session = exported(source, tmp_path, "tflite")
    assert session({"x": np.ones((3, STEPS, 2), np.float32)})["y"].tolist() == [[3, 3]] * 3
    monkeypatch.setattr(built_in_graph, "rewritten", lambda source: source.model)
    with pytest.raises(Unsupported, match="element_shape"):
        exported(source, tmp_path, "tflite")


def test_new_axes_are_exported_to_tflite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, None, 2], tf.float32, name="x")])  # type: ignore[untyped-decorator]
    def axes(x: Any) -> Any:
        new = tf.newaxis
        first = x[..., 0]
        return {
            "a": first[..., new],
            "b": first[:, new, :, new],
            "c": x[:, new, ..., new, :, new],
        }

    with quiet():
        module = tf.Module()
        module.serve = axes
        tf.saved_model.save(module, str(tmp_path / "axes"), signatures=axes)
    source = read(tmp_path / "axes")
    inputs = {"x": np.random.default_rng(0).standard_normal((3, 4, 2)).astype(np.float32)}
    expected = source.reference(inputs)
    for name, y in exported(source, tmp_path, "tflite")(inputs).items():
        np.testing.assert_array_equal(y, expected[name])
    monkeypatch.setattr(built_in_graph, "rewritten", lambda source: source.model)
    with pytest.raises(Unsupported, match="StridedSlice"):
        exported(source, tmp_path, "tflite")


def test_checks_of_open_sizes_do_not_end_the_trace(tmp_path: Path) -> None:
    def build() -> Any:
        x = keras.Input((None, None, 2), name="x")
        return keras.Model(x, layers.UpSampling2D(2, interpolation="bilinear")(x))

    path = saved(build, tmp_path / "larger.keras")
    assert read(path, inputs=["x:FP32[3,-1,2]"]).signature.outputs[0].dims == (6, -1, 2)
    source = read(path)
    x = {"x": np.random.default_rng(0).standard_normal((2, 3, 4, 2)).astype(np.float32)}
    (expected,) = source.reference(x).values()
    (actual,) = exported(source, tmp_path, "onnx")(x).values()
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_a_graph_and_a_padded_text_run_at_their_own_sizes(tmp_path: Path) -> None:
    def graph() -> Any:
        nodes, edges = keras.Input((None, 2), name="nodes"), keras.Input((None, None), name="edges")
        return keras.Model([nodes, edges], keras.ops.matmul(edges, nodes))

    def text() -> Any:
        tokens = keras.Input((None,), dtype="int32", name="tokens")
        words = layers.Embedding(5, 2, mask_zero=True)(tokens)
        return keras.Model(tokens, layers.GlobalAveragePooling1D()(words))

    axes = read(saved(graph, tmp_path / "graph.keras")).signature.axes
    assert list(axes) == ["axis"]
    source = read(saved(text, tmp_path / "text.keras"))
    sample = source.spec.sample
    assert sample is not None
    rows = sample(source.signature, 50, {"tokens_0": 1}, np.random.default_rng(0))["tokens"]
    assert rows.all()  # the mean of no word is no number


def test_random_answers_are_refused(tmp_path: Path) -> None:
    def noisy(x: Any) -> Any:
        return x + tf.random.uniform([3])

    with pytest.raises(Unsupported, match="'y' differs from call to call"):
        read(saved_graph(tmp_path / "noisy", noisy))


def test_spectra_are_exported_to_onnx(tmp_path: Path) -> None:
    def spectra(x: Any) -> Any:
        frames = tf.signal.frame(tf.pad(x, [[0, 0], [0, 9]]), 8, 2)
        whole = tf.signal.rfft(frames, [16])
        magnitudes = tf.math.log1p(tf.abs(whole))
        return tf.concat([tf.math.real(whole), tf.math.imag(whole), magnitudes], -1)

    source = read(saved_graph(tmp_path / "spectra", spectra))
    row, path = FORMATS.builtin["onnx"], tmp_path / "spectra.onnx"
    row.export(source, path, ExportTarget(opset=18))
    x = {"x": np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)}
    actual = row.open_session(path)(x)["y"]
    np.testing.assert_allclose(actual, source.reference(x)["y"], atol=1e-5)


@pytest.mark.parametrize("dtype", [tf.float32, thorough(tf.int32)])
def test_buckets_are_exported_to_onnx(tmp_path: Path, dtype: Any) -> None:
    def buckets(x: Any) -> Any:
        return tf.raw_ops.Bucketize(input=x, boundaries=[-1.5, 0.0, 2.0, 2.5])

    source = read(saved_graph(tmp_path / "buckets", buckets, dtype=dtype))
    x = {"x": np.array([[-2, -1.5, -1], [0, 1, 2], [2.25, 2.5, 3]], dtype.as_numpy_dtype)}
    actual = exported(source, tmp_path, "onnx")(x)["y"]
    np.testing.assert_array_equal(actual, source.reference(x)["y"])


def test_an_answer_to_nan_is_the_models_if_it_compares_floats(tmp_path: Path) -> None:
    def handled(x: Any) -> Any:
        return tf.where(tf.math.is_nan(x), 0.0, x)

    def rectified(x: Any) -> Any:
        return tf.nn.relu(x)

    chance = read(saved_graph(tmp_path / "rectified", rectified)).compares
    assert chance is not None
    assert not chance()
    source = read(saved_graph(tmp_path / "handled", handled))

    def broken(inputs: Any) -> Any:
        return {"y": inputs["x"]}

    session: Any = broken
    session.inputs, session.outputs = ["x"], ["y"]
    limits = {"samples": 8, "seed": 0, "atol": 1e-5, "rtol": 1e-4}
    with pytest.raises(ParityError, match="NaN"):
        parity.check(source, session, **limits)
    assert parity.check(replace(source, compares=chance), session, **limits).limits
