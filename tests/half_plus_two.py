"""TensorFlow Serving's first model: y = x / 2 + 2, with signatures for each of its methods."""

from __future__ import annotations

from pathlib import Path

from modelport.exporters.runtime.tensorflow_runtime import tf

v1 = tf.compat.v1
_METHOD = "tensorflow/serving/"


def save(folder: Path) -> None:
    """A SavedModel as ``saved_model_half_plus_two.py`` of tensorflow/serving makes it: a graph of
    TensorFlow 1 that takes any shape, with serialized examples of unknown rank.
    """
    graph = tf.Graph()
    with graph.as_default(), v1.Session(graph=graph) as session:
        examples = v1.placeholder(tf.string, name="tf_example")
        features = {
            "x": v1.io.FixedLenFeature([1], tf.float32),
            "x2": v1.io.FixedLenFeature([1], tf.float32, [0.0]),
        }
        parsed = v1.io.parse_example(examples, features)
        x, x2 = tf.identity(parsed["x"], "x"), tf.identity(parsed["x2"], "x2")
        for tensor in (x, x2):
            tensor.set_shape([None, 1])  # what the signature says; the graph takes any
        half, two = v1.get_variable("a", initializer=0.5), v1.get_variable("b", initializer=2.0)
        y, y2, y3 = (
            tf.add(tf.multiply(half, value), offset, name)
            for name, value, offset in (("y", x, two), ("y2", x, 3.0), ("y3", x2, 3.0))
        )
        session.run(v1.global_variables_initializer())
        signatures = {
            "serving_default": signature({"x": x}, {"y": y}, "predict"),
            "classify_x_to_y": signature({"inputs": examples}, {"scores": y}, "classify"),
            "regress_x_to_y": signature({"inputs": examples}, {"outputs": y}, "regress"),
            "regress_x_to_y2": signature({"inputs": examples}, {"outputs": y2}, "regress"),
            "regress_x2_to_y3": signature({"inputs": x2}, {"outputs": y3}, "regress"),
        }
        builder = v1.saved_model.Builder(str(folder))
        builder.add_meta_graph_and_variables(session, ["serve"], signatures)
        builder.save()


def signature(inputs: dict[str, object], outputs: dict[str, object], method: str) -> object:
    """The description of a signature for a method of TensorFlow Serving."""
    infos = [
        {name: v1.saved_model.build_tensor_info(tensor) for name, tensor in side.items()}
        for side in (inputs, outputs)
    ]
    return v1.saved_model.build_signature_def(*infos, _METHOD + method)
