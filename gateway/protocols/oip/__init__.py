"""The Open Inference Protocol with Triton's extensions."""
