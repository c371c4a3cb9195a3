"""Embedded TensorFlow Lite: LiteRT, or the older ``tflite_runtime``.

Names are those of one of the model's signatures; without signatures, those of its tensors. An
interpreter takes one run at a time, so every instance has its own. Variables have their initial
values at the start of each run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded import embedded_backend, placement, serving
from modelport.gateway.backends.embedded.embedded_backend import (
    Compute,
    EmbeddedBackend,
    SessionPool,
)
from modelport.gateway.backends.embedded.native_output import filtered_stderr
from modelport.gateway.errors import InvalidArgument, Unsupported
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.artifact_checks import tflite_guard
from modelport.gateway.repository.autocomplete import ArtifactTensor
from modelport.gateway.runtime import litert_outputs
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, ModelSignature, TensorSpec

try:
    from ai_edge_litert.interpreter import Interpreter
except ImportError:
    from tflite_runtime.interpreter import Interpreter

SIGNATURE = "serving_default"

_DATATYPES = {
    np.dtype(dtype).type: datatype
    for datatype, dtype in NUMPY_DTYPES.items()
    if datatype not in (Datatype.BYTES, Datatype.BF16)
} | {np.bytes_: Datatype.BYTES}

_Details = Mapping[str, Mapping[str, Any]]


def load(artifact: Artifact) -> EmbeddedBackend:
    """Open and warm one interpreter for each instance (blocking).

    Raises:
        InvalidArgument: the file is not a valid model, or contradicts its configuration.
        IntegrityError: the model uses custom operators, and is not trusted.
        Unsupported: an input or output has an unsupported type, or a GPU is requested.
    """
    path = embedded_backend.artifact_file(artifact)
    config = placement.on_cpu(artifact, "TensorFlow Lite models")
    threads = parameters.threads(config, "tflite_num_threads", artifact.threads, minimum=1)
    wanted = parameters.text(config, "TF_SIGNATURE_DEF", SIGNATURE)
    with embedded_backend.opening(artifact):
        # One copy in memory, because a mapped file would change if it is overwritten.
        content = path.read_bytes()
        if not artifact.native:
            tflite_guard.check(content, path.name)
        with filtered_stderr():  # "INFO: Created TensorFlow Lite XNNPACK delegate for CPU."
            state = tflite_guard.state(content, path.name)
            sessions = [
                InterpreterSession(partial(_open, content, path, threads, wanted), state)
                for _ in range(configuration.instance_count(config))
            ]
    pool = SessionPool(sessions)
    backend = serving.serve(artifact, pool, config)
    if not config.input:  # a declared shape binds every dialect
        backend.serve_signatures({wanted: _any_shape(pool)}, {wanted: _of_any_shape(pool)}, b"")
    return backend


def _any_shape(pool: SessionPool) -> ModelSignature:
    """The signature as in TensorFlow Serving: interpreters accept other shapes where they can."""
    inputs, outputs = (
        tuple(TensorSpec(t.name, t.datatype, t.shape) for t in side)
        for side in (pool.inputs, pool.outputs)
    )
    return ModelSignature(inputs, outputs, any_shape=True)


def _of_any_shape(pool: SessionPool) -> Compute:
    def run(names: Sequence[str], inputs: dict[str, Array]) -> Sequence[Array]:
        try:
            return pool.run(names, inputs)
        except (RuntimeError, ValueError) as error:
            raise InvalidArgument(embedded_backend.public_reason(error)) from error

    return run


def _open(content: bytes, path: Path, threads: int, wanted: str) -> tuple[Any, Any]:
    """An interpreter, and a runner of its signature."""
    interpreter = Interpreter(model_content=content, num_threads=threads)
    try:
        interpreter.allocate_tensors()
    except RuntimeError:
        # The placeholder of a dynamic size may be impossible; every run allocates again.
        if all(-1 not in details["shape_signature"] for details in interpreter.get_input_details()):
            raise
    signatures = interpreter.get_signature_list()
    if not signatures:
        return interpreter, _PlainRunner(interpreter)
    key = wanted if wanted in signatures else next(iter(signatures))
    if key != wanted and (len(signatures) > 1 or wanted != SIGNATURE):
        raise InvalidArgument(
            f"'{path.name}' has no signature '{wanted}'; set the parameter "
            f"TF_SIGNATURE_DEF to one of {', '.join(map(repr, signatures))}"
        )
    return interpreter, interpreter.get_signature_runner(key)


class InterpreterSession:
    """A ``ModelSession`` over one interpreter, for one run at a time.

    Args:
        make: makes a new interpreter with a runner, which resizes inputs and copies outputs.
    """

    def __init__(
        self, make: Callable[[], tuple[Any, Any]], state: tflite_guard.TfliteState
    ) -> None:
        self._make, self._state = make, state
        self._interpreter, self._runner = make()
        operators = self._interpreter._get_ops_details()
        self.bounded = all(operator["op_name"] != "WHILE" for operator in operators)
        self.random = state.random
        self.state = "variables" if state.tensors or state.resources else ""
        self.inputs = _tensors(self._runner.get_input_details())
        self.outputs = _tensors(self._runner.get_output_details())

    def run(self, names: Sequence[str], inputs: dict[str, Array]) -> list[Array]:
        if self._state.resources:  # which ``reset_all_variables`` leaves as they are
            self._interpreter, self._runner = self._make()
        elif self._state.tensors:
            self._interpreter.reset_all_variables()
        results = litert_outputs.run(self._interpreter, self._runner, inputs)
        return [results[name] for name in names]

    def close(self) -> None:
        del self._runner, self._interpreter, self._make


class _PlainRunner:
    """A runner like those of signatures, for a file without any."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter = interpreter
        self._inputs, self._outputs = self.get_input_details(), self.get_output_details()
        self._shapes: dict[str, tuple[int, ...]] = {}

    def get_input_details(self) -> _Details:
        return {details["name"]: details for details in self._interpreter.get_input_details()}

    def get_output_details(self) -> _Details:
        return {details["name"]: details for details in self._interpreter.get_output_details()}

    def __call__(self, **inputs: Array) -> dict[str, Array]:
        interpreter = self._interpreter
        shapes = {name: data.shape for name, data in inputs.items()}
        if shapes != self._shapes:
            self._shapes = {}  # unknown until the interpreter has accepted them
            for name, shape in shapes.items():
                interpreter.resize_tensor_input(self._inputs[name]["index"], shape)
            interpreter.allocate_tensors()
            self._shapes = shapes
        for name, data in inputs.items():
            interpreter.set_tensor(self._inputs[name]["index"], data)
        interpreter.invoke()
        return {n: interpreter.get_tensor(each["index"]) for n, each in self._outputs.items()}


def _tensors(details: _Details) -> list[ArtifactTensor]:
    return [_tensor(name, detail) for name, detail in sorted(details.items())]


def _tensor(name: str, detail: Mapping[str, Any]) -> ArtifactTensor:
    if detail["dtype"] not in _DATATYPES:
        raise Unsupported(f"'{name}' has an unsupported type: {detail['dtype'].__name__}")
    # Without dynamic sizes ``shape_signature`` is empty.
    shape = detail["shape_signature"] if len(detail["shape_signature"]) else detail["shape"]
    return ArtifactTensor(name, _DATATYPES[detail["dtype"]], tuple(map(int, shape)))
