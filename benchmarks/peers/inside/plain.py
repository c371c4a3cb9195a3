"""Requests and answers of servers without a protocol of their own: `{"x": [[1, 2]]}`, or .npy."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy
from onnx_model import OnnxModel


class Plain:
    """A model with plain JSON and .npy requests."""

    def __init__(self, path: str) -> None:
        self.model = OnnxModel(path)

    def json(self, body: Mapping[str, Any]) -> dict[str, Any]:
        kinds = self.model.inputs
        inputs = {name: numpy.array(values, kinds[name]) for name, values in body.items()}
        return {name: y.tolist() for name, y in self.model.run(inputs).items()}

    def array(self, file: Any) -> dict[str, numpy.ndarray]:
        (name,) = self.model.inputs
        return self.model.run({name: numpy.load(file)})

    def binary(self, body: bytes) -> bytes:
        """Answer .npy with .npz."""
        out = io.BytesIO()
        numpy.savez(out, **self.array(io.BytesIO(body)))
        return out.getvalue()
