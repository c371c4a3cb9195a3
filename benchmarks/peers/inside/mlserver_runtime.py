"""Runs inside the `mlserver` environment: the smallest custom runtime that answers raw bytes."""

from __future__ import annotations

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from onnx_model import OnnxModel


class OnnxRuntime(MLModel):
    """The runtime."""

    async def load(self) -> bool:
        self._model = OnnxModel(self.settings.parameters.uri)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        inputs = {one.name: NumpyCodec.decode_input(one) for one in payload.inputs}
        outputs = self._model.run(inputs)
        return InferenceResponse(
            model_name=self.name,
            model_version=self.version,
            outputs=[NumpyCodec.encode_output(name, y) for name, y in outputs.items()],
        )
