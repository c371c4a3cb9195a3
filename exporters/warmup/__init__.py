"""Warm-up requests in the layouts that Triton and TensorFlow Serving read."""
