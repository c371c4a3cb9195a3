"""``modelport convert``: weight conversion between Keras and PyTorch, and its proof."""
