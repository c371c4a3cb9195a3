"""TensorFlow and Keras, imported without their start-up messages; import them only from here.

The import takes seconds and about 780 MB of memory, so import this module only where it is needed.
"""

from __future__ import annotations

import os

from modelport.exporters.runtime.output_capture import muted

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

with muted():  # messages printed before logging is configured ignore the level
    import keras
    import tensorflow as tf

__all__ = ["keras", "tf"]
