"""Writes a model ``y = 2 x`` of four floats in the format of one framework.

python tests/deploy/artifacts.py torch|tensorflow|litert FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import models


def torch(folder: Path) -> None:
    import torch

    class TorchDouble(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    traced = torch.jit.trace(TorchDouble(), torch.zeros(2, 4))  # type: ignore[no-untyped-call]
    traced.save(str(folder / "model.pt"))


def function() -> Any:
    import tensorflow as tf

    class TensorFlowDouble(tf.Module):  # type: ignore[misc]
        @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")])  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            return {"y": x * 2}

    return TensorFlowDouble()


def tensorflow(folder: Path) -> None:
    import tensorflow as tf

    module = function()
    signatures = module.__call__.get_concrete_function()
    tf.saved_model.save(module, str(folder / "model.savedmodel"), signatures)


def litert(folder: Path) -> None:
    import tensorflow as tf

    module = function()
    concrete = module.__call__.get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], module)
    (folder / "model.tflite").write_bytes(converter.convert())


BACKENDS = {"torch": "pytorch", "tensorflow": "tensorflow", "litert": "tflite"}

if __name__ == "__main__":
    target, model = sys.argv[1], Path(sys.argv[2])
    (model / "1").mkdir(parents=True)
    {"torch": torch, "tensorflow": tensorflow, "litert": litert}[target](model / "1")
    tensors = (["x FP32 4"], ["y FP32 4"])
    (model / "config.pbtxt").write_text(models.config("own", *tensors, backend=BACKENDS[target]))
