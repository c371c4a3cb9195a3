"""Runs inside Triton's Python backend, beside model.onnx."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)  # the backend's Python ignores it

import onnxruntime  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = str(Path(__file__).with_name("model.onnx"))
        self._session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        y = self._session.run(["y"], {"x": x})[0]
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])
