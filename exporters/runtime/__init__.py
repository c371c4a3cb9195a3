"""Services of the exporters' process: captured output, TensorFlow, a local gateway."""
