"""ONNX Runtime on one thread, for the programs that run inside the peers' environments."""

from __future__ import annotations

from collections.abc import Mapping

import numpy
import onnxruntime

DTYPES = {"tensor(float)": numpy.float32, "tensor(int64)": numpy.int64}


class OnnxModel:
    """A model file; ``inputs`` maps names to numpy types, ``outputs`` are names."""

    def __init__(self, path: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        self.inputs = {one.name: DTYPES[one.type] for one in self.session.get_inputs()}
        self.outputs = [one.name for one in self.session.get_outputs()]
        #: seq_lens is [batch] in the file and [batch, 1] on the wire, as its `reshape` says.
        self._flat = {one.name for one in self.session.get_inputs() if len(one.shape) == 1}

    def run(self, inputs: Mapping[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
        if self._flat:
            inputs = {
                name: array.reshape(-1) if name in self._flat else array
                for name, array in inputs.items()
            }
        return dict(zip(self.outputs, self.session.run(self.outputs, inputs), strict=True))
