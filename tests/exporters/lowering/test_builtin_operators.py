"""TensorFlow Lite computes the lowered operators with its built-in kernels."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from ai_edge_litert.interpreter import Interpreter

from modelport.exporters.lowering.built_in import built_in_operators
from modelport.exporters.lowering.operators import OPERATORS
from modelport.exporters.lowering.registry import apply
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.tensorflow_runtime import tf
from tests.exporters.lowering.layer_calls import layer_calls
from tests.exporters.lowering.oracle import OperatorCall, as_tensorflow

#: Operators that only a SavedModel has, as docs/exporting.md says.
SAVED_MODEL_ONLY = frozenset(
    (
        *("real", "imag", "resolve_conj", "resolve_neg", "view_as_complex_copy"),
        *("view_as_real_copy", "conj", "_conj", "_conj_copy", "conj_physical", "_conj_physical"),
        "stft",
    )
)

#: Calls of each operator in the graph.
SAMPLED = 2


def sampled_calls() -> list[OperatorCall]:
    """A few calls of each layer's operator, the last ones, which are the least plain."""
    found: dict[str, list[OperatorCall]] = {}
    for call in layer_calls():
        if call.name in OPERATORS and call.name not in SAVED_MODEL_ONLY:
            found.setdefault(call.name, []).append(call)
    return [call for calls in found.values() for call in calls[-SAMPLED:]]


class CallsInOneFunction(tf.Module):  # type: ignore[misc]
    """All calls in one function; the first tensor of each is an input with a dynamic axis."""

    def __init__(self, calls: list[OperatorCall]) -> None:
        super().__init__()
        self.calls = calls
        self.inputs = [as_tensorflow(call.args[0]) for call in calls]

    def concrete(self) -> Any:
        specs = [
            tf.TensorSpec([None, *x.shape[1:]], x.dtype, name=f"x{i:03}")
            for i, x in enumerate(self.inputs)
        ]

        @tf.function(input_signature=specs, autograph=False)
        def run(*tensors: Any) -> dict[str, Any]:
            results = {}
            for i, (x, call) in enumerate(zip(tensors, self.calls, strict=True)):
                args, kwargs = as_tensorflow((call.args[1:], dict(call.kwargs)))
                result = apply(call.name, [x, *args], kwargs)
                first = result[0] if isinstance(result, tuple | list) else result
                results[f"y{i:03}"] = tf.identity(first)
            return results

        self.run = run
        return run.get_concrete_function()


@pytest.mark.skipif(
    os.environ.get("MODELPORT_SLOW_TESTS") != "1", reason="converts a graph of 200 operators"
)
def test_tensorflow_lite_computes_layers_with_its_built_in_operators() -> None:
    calls = [
        call
        for call in sampled_calls()
        if isinstance(call.args[0], torch.Tensor) and call.args[0].ndim
    ]
    graph = CallsInOneFunction(calls)
    with built_in_operators(), quiet():
        converter = tf.lite.TFLiteConverter.from_concrete_functions([graph.concrete()], graph)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
        content = converter.convert()
    interpreter = Interpreter(model_content=content)
    places = {
        each["name"].removeprefix("serving_default_"): each
        for each in interpreter.get_input_details()
    }
    for i, x in enumerate(graph.inputs):
        interpreter.resize_tensor_input(places[f"x{i:03}:0"]["index"], x.shape)
    interpreter.allocate_tensors()
    for i, x in enumerate(graph.inputs):
        interpreter.set_tensor(places[f"x{i:03}:0"]["index"], x.numpy())
    interpreter.invoke()
    found = [interpreter.get_tensor(each["index"]) for each in interpreter.get_output_details()]
    expected = graph.run(*graph.inputs)
    wrong = []
    for i, call in enumerate(calls):
        y = expected[f"y{i:03}"].numpy()
        same = any(
            each.shape == y.shape and np.allclose(each, y, 1e-4, 1e-4, equal_nan=True)
            for each in found
        )
        if not same:
            wrong.append(repr(call))
    assert wrong == []
