"""PyTorch to TensorFlow: an interpreter of ``torch.export`` programs inside a ``tf.function``.

``lower`` exports a module with symbolic sizes, decomposes it into the operators of a table, and
runs these one by one with TensorFlow's tensors. Sizes that are not static are read from the tensors
at run time, weights are variables.
"""
