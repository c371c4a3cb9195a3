"""Protobuf messages generated from the ``.proto`` files here by ``make protos``."""

# The messages import TensorFlow; importing it here first keeps it quiet.
import modelport.exporters.runtime.tensorflow_runtime  # noqa: F401
