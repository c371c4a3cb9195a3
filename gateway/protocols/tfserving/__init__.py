"""TensorFlow Serving's REST and gRPC."""
