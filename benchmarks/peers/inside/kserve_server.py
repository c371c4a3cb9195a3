"""Runs inside the `kserve` environment: a custom model, KServe's own command line."""

from __future__ import annotations

import argparse
import os
from typing import Any

import kserve
from kserve import InferOutput, InferRequest, InferResponse
from kserve.utils.utils import generate_uuid
from onnx_model import OnnxModel

DATATYPES = {"float32": "FP32", "int64": "INT64"}


class KServeModel(kserve.Model):
    """The model."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._model = OnnxModel(os.environ["MODEL_FILE"])
        self.ready = True

    def predict(
        self, payload: InferRequest, headers: Any = None, response_headers: Any = None
    ) -> InferResponse:
        result = self._model.run({one.name: one.as_numpy() for one in payload.inputs})
        binary = payload.use_binary_outputs
        outputs = []
        for name, y in result.items():
            output = InferOutput(name, list(y.shape), DATATYPES[str(y.dtype)])
            output.set_data_from_numpy(y, binary_data=binary)
            outputs.append(output)
        return InferResponse(
            payload.id or generate_uuid(), self.name, outputs, use_binary_outputs=binary
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[kserve.model_server.parser])
    arguments, _ = parser.parse_known_args()
    kserve.ModelServer().start([KServeModel(arguments.model_name)])
