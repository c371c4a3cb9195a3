"""Weights of a program as variables, and what is computed from weights alone, once, at export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelport.exporters.lowering.datatypes import tf_dtype
from modelport.exporters.runtime.tensorflow_runtime import tf

#: Larger tensors become variables, which a SavedModel stores outside of its graph.
LARGEST_CONSTANT = 128


def constant_of(tensor: torch.Tensor) -> Any:
    """A constant with the values of ``tensor``: a variable, unless it is small."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    dtype = tf_dtype(tensor.dtype)
    if tensor.dtype is torch.bfloat16:
        array = tensor.contiguous().view(torch.int16).numpy().view(dtype.as_numpy_dtype)
    else:
        array = tensor.numpy()
    with tf.init_scope():
        return _kept(tf.constant(array, dtype))


def _kept(value: Any) -> Any:
    if value.shape.num_elements() <= LARGEST_CONSTANT:
        return value
    return tf.Variable(value, trainable=False)


def is_constant(x: Any) -> bool:
    """Whether ``x`` is a weight, or was computed from weights alone."""
    return isinstance(x, tf.Variable) or (tf.is_tensor(x) and not tf.is_symbolic_tensor(x))


def at_export(function: Callable[..., Any], weight: Any, *static: Any) -> Any:
    """Compute ``function(weight, *static)`` once, at export, if ``weight`` is constant.

    The same function of the same weight gives the same variable, so that a layer called twice is
    stored once.

    Args:
        function: a function that lives as long as the process, not a lambda.
        static: hashable arguments.
    """
    if not isinstance(weight, tf.Variable):
        if not is_constant(weight):
            return function(weight, *static)
        with tf.init_scope():
            return function(weight, *static)
    derived = vars(weight).setdefault("derived", {})
    key = (function, static)
    if key not in derived:
        with tf.init_scope():
            derived[key] = _kept(function(weight, *static))
    return derived[key]


def fold(function: Callable[[], Any], budget: int) -> Any:
    """Compute ``function()`` at export; None if the result is not a tensor of ``budget`` bytes."""
    with tf.init_scope():
        value = function()
        if not tf.is_tensor(value) or value.dtype == tf.variant:
            return None
        if value.dtype.size * value.shape.num_elements() > budget:
            return None
        return value if isinstance(value, tf.Variable) else _kept(value)
