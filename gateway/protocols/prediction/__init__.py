"""Predictions, as shared by the dialects of TorchServe, SageMaker and Vertex AI."""
