"""Runs inside Triton's Python backend, beside model.onnx."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)  # the backend's Python ignores it

import triton_python_backend_utils as pb_utils  # noqa: E402
from onnx_model import OnnxModel  # noqa: E402


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = OnnxModel(str(Path(__file__).with_name("model.onnx")))

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        inputs = {
            name: pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in self._model.inputs
        }
        outputs = self._model.run(inputs)
        return pb_utils.InferenceResponse([pb_utils.Tensor(n, y) for n, y in outputs.items()])
