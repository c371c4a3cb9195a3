"""ONNX files in ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime

from modelport.gateway.repository.artifact_checks import onnx_guard
from modelport.gateway.types import Array

ORT_FATAL_ONLY = 4  # errors are raised, and told once


class OnnxParitySession:
    """An ONNX file in ONNX Runtime on the CPU."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.load_model_format", "ONNX")
        options.log_severity_level = ORT_FATAL_ONLY
        # The reference runs in turn with this session; threads that spin between runs would starve
        # it.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        self.inputs = [value.name for value in self._session.get_inputs()]
        self.outputs = [value.name for value in self._session.get_outputs()]

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        texts = {n: [x.decode() for x in a.flat] for n, a in inputs.items() if a.dtype == object}
        strings = {n: np.array(x, object).reshape(inputs[n].shape) for n, x in texts.items()}
        values = self._session.run(None, {**inputs, **strings})
        return dict(zip(self.outputs, values, strict=True))


def open_session(path: Path, trusted: bool = False) -> OnnxParitySession:
    """Open an ONNX file; raise ``IntegrityError`` if it uses custom code or files elsewhere."""
    if not trusted:
        onnx_guard.check(path)
    return OnnxParitySession(path)
