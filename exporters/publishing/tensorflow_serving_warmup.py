"""Warm-up requests in a SavedModel, which TensorFlow Serving runs before it serves a version.

Source: "SavedModel Warmup" in TensorFlow Serving's documentation; a TFRecord file of
``PredictionLog`` messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from modelport.exporters.formats.savedmodel import SIGNATURE
from modelport.exporters.publishing.proto import prediction_log_pb2 as pb
from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.gateway.types import Array

REQUESTS_FILE = Path("assets.extra", "tf_serving_warmup_requests")


def write(savedmodel: Path, model_name: str, requests: Sequence[Mapping[str, Array]]) -> None:
    """Write ``requests``, inputs by name in the signature's shapes, into a SavedModel.

    Args:
        savedmodel: the folder of a SavedModel.
        requests: at most 1000, or TensorFlow Serving refuses to load the version.
    """
    path = savedmodel / REQUESTS_FILE
    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as file:
        for inputs in requests:
            tensors = {name: tf.make_tensor_proto(array) for name, array in inputs.items()}
            model = pb.ModelSpec(name=model_name, signature_name=SIGNATURE)
            request = pb.PredictRequest(model_spec=model, inputs=tensors)
            log = pb.PredictionLog(predict_log=pb.PredictLog(request=request))
            file.write(log.SerializeToString(deterministic=True))
