"""What the dialects of TorchServe, SageMaker and Vertex share: one body, whatever its form."""
