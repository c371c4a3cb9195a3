"""An ONNX file in Triton's Python backend; Triton runs this program beside ``model.onnx``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)  # the backend's Python ignores it

import onnxruntime  # noqa: E402

import triton_python_backend_utils as pb_utils  # noqa: E402


class TritonPythonModel:
    """The model, on one thread as every other server runs it."""

    def initialize(self, args: dict[str, str]) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(Path(__file__).with_name("model.onnx")),
            options,
            providers=["CPUExecutionProvider"],
        )
        self._inputs = {value.name: len(value.shape) for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        inputs = {}
        for name, rank in self._inputs.items():
            tensor = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            # ``config.pbtxt`` reshapes [batch, 1] to the file's [batch].
            inputs[name] = tensor.reshape(-1) if rank == 1 else tensor
        values = self._session.run(self._outputs, inputs)
        tensors = zip(self._outputs, values, strict=True)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in tensors])
