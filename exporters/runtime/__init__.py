"""Services of the exporters' process: progress, captured output, TensorFlow, a local gateway."""
