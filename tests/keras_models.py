"""Small Keras models and SavedModels for the exporters' tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelport.exporters.loaded_model import Source
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.tensorflow_runtime import keras, tf
from modelport.exporters.sources import SourceRequest
from modelport.exporters.sources.reader_selection import load

layers, ops = keras.layers, keras.ops


Build = Callable[[], Any]


def scorer() -> Any:
    """Two inputs by name, two outputs, an axis, a vocabulary, an exact GELU."""
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    amount = keras.Input((3,), name="amount")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(20, 4)(tokens))
    hidden = layers.Dense(6)(layers.Concatenate()([hidden, amount]))
    hidden = ops.gelu(hidden, approximate=False)
    kind = layers.Dense(5, activation="softmax", name="kind")(hidden)
    risk = layers.Dense(1, activation="sigmoid", name="risk")(hidden)
    return keras.Model({"tokens": tokens, "amount": amount}, {"risk": risk, "kind": kind})


def saved(build: Build, path: Path) -> Path:
    with quiet():
        keras.utils.set_random_seed(0)
        build().save(path)
    return path


def read(path: Path, **kwargs: Any) -> Source:
    return load(SourceRequest(path, **kwargs))


def functional(inputs: Any, outputs: Any) -> Build:
    return lambda: keras.Model(inputs, outputs)


def saved_graph(
    folder: Path,
    function: Callable[[Any], Any],
    *,
    name: str = "serving_default",
    dtype: Any = tf.float32,
    **tracked: Any,
) -> Path:
    """A SavedModel of one function over ``x``, ``[B, 3]``."""
    module = tf.Module()
    for attribute, value in {"unused": tf.Variable(0.0), **tracked}.items():
        setattr(module, attribute, value)
    spec = tf.TensorSpec([None, 3], dtype, name="x")
    module.serve = tf.function(lambda x: {"y": function(x)}, input_signature=[spec])
    with quiet():
        tf.saved_model.save(module, str(folder), signatures={name: module.serve})
    return folder
