"""Runs inside Triton's Python backend: an output that is its input."""

from __future__ import annotations

import os
import sys
from typing import Any

sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)  # the backend's Python ignores it

import numpy  # noqa: E402, F401 - this one, before the backend finds another

import triton_python_backend_utils as pb_utils  # noqa: E402


class TritonPythonModel:
    """The model."""

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
