"""Messages generated from the ``.proto`` files here; ``make protos`` writes them anew."""

# They import TensorFlow's own messages, and with them TensorFlow: quietly, if it goes first.
import modelport.exporters.tensorflow_runtime  # noqa: F401
