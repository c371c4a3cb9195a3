"""TorchServe's REST and gRPC."""
