"""TensorFlow and Keras, imported so that they keep quiet: always from here, never directly.

Importing them takes seconds and some 780 MB of memory: do it where they are needed at once.
"""

from __future__ import annotations

import os

from modelport.exporters.output_capture import muted

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

with muted():  # what it says before its logging is set up ignores the level
    import keras
    import tensorflow as tf

__all__ = ["keras", "tf"]
