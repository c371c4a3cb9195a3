"""Archives of ``modelport package --for torchserve`` in the real TorchServe: a peer check."""
