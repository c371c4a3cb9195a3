"""ONNX operator sets: the default of each exporter, and the versions that it can write."""

from __future__ import annotations

#: From PyTorch: the default, the first one with 4-bit tensors, and the oldest of torch.onnx.
TORCH_DEFAULT, INT4, TORCH_OLDEST = 20, 21, 18
#: From TensorFlow: all that tf2onnx writes; the newest is the default.
TENSORFLOW = range(13, 19)
#: From scikit-learn and boosted trees: ONNX's own operators, and those of classical models.
TREES, TREES_ML = 18, 3
