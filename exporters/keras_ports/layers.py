"""Keras layers that the ports need; they are registered so that ``.keras`` files load safely.

Open sizes are taken from the tensors when the graph is traced, and every
operation has a TensorFlow Lite kernel.
"""

from __future__ import annotations

import math
from typing import Any

from modelport.exporters.runtime.tensorflow_runtime import keras, tf

ops = keras.ops

# Gives a weight of exactly zero when added to a score; infinity times 0 would be NaN.
MASKED = -3e4

register = keras.saving.register_keras_serializable(package="modelport")


@register
class Positions(keras.layers.Layer):  # type: ignore[misc]
    """A learned vector for each step: tokens ``[B, T]`` to ``[T, width]``."""

    def __init__(self, max_positions: int, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_positions = max_positions
        self.width = width

    def build(self, tokens_shape: Any) -> None:
        self.embeddings = self.add_weight(
            shape=(self.max_positions, self.width), initializer="uniform", name="embeddings"
        )

    def call(self, tokens: Any) -> Any:
        # With a single position a slice would broadcast, and hide that T is too large.
        return ops.take(self.embeddings, ops.arange(ops.shape(tokens)[1], dtype="int32"), axis=0)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "max_positions": self.max_positions,
            "width": self.width,
        }


@register
class RealTokens(keras.layers.Layer):  # type: ignore[misc]
    """Mask of real tokens: 1 for a token and 0 for padding.

    Maps tokens ``[B, T]`` and lengths ``[B]``, clamped into ``[1, T]``, to ``[B, T]``.
    """

    def call(self, tokens: Any, seq_lens: Any) -> Any:
        length = ops.shape(tokens)[1]
        longest = ops.cast(length, seq_lens.dtype)
        lengths = ops.maximum(ops.minimum(seq_lens, longest), 1)
        steps = ops.arange(length, dtype="int32")
        real = ops.expand_dims(steps, 0) < ops.expand_dims(ops.cast(lengths, "int32"), 1)
        return ops.cast(real, self.compute_dtype)


@register
class KeyBias(keras.layers.Layer):  # type: ignore[misc]
    """Bias that excludes padding from attention scores: ``[B, T]`` to ``[B, 1, 1, T]``."""

    def call(self, real: Any) -> Any:
        return ops.expand_dims((1 - real) * MASKED, (1, 2))


@register
class Attention(keras.layers.Layer):  # type: ignore[misc]
    """Multi-head scaled dot-product attention after the projections; it has no weights.

    Query, key and value ``[B, T, width]``, and a bias that broadcasts to ``[B, heads, T, T]`` or
    None, to ``[B, T, width]``. Vaswani et al. 2017, section 3.2.
    """

    def __init__(self, num_heads: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_heads = num_heads

    def call(self, query: Any, key: Any, value: Any, bias: Any = None) -> Any:
        width = query.shape[-1] // self.num_heads
        query = ops.transpose(self._split(query), (0, 2, 1, 3)) / math.sqrt(width)
        key = ops.transpose(self._split(key), (0, 2, 3, 1))
        value = ops.transpose(self._split(value), (0, 2, 1, 3))
        # Half precision is too coarse for a sum of hundreds of weights.
        scores = ops.cast(ops.matmul(query, key), "float32")
        if bias is not None:
            scores = scores + ops.cast(bias, "float32")
        # Keras' own softmax, otherwise the same, warns about a single key.
        weights = ops.cast(tf.nn.softmax(scores), self.compute_dtype)
        mixed = ops.transpose(ops.matmul(weights, value), (0, 2, 1, 3))
        return ops.reshape(mixed, (-1, ops.shape(mixed)[1], self.num_heads * width))

    def _split(self, projected: Any) -> Any:
        width = projected.shape[-1] // self.num_heads
        return ops.reshape(projected, (-1, ops.shape(projected)[1], self.num_heads, width))

    def compute_output_spec(self, query: Any, key: Any, value: Any, bias: Any = None) -> Any:
        return keras.KerasTensor(query.shape, dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "num_heads": self.num_heads}


@register
class MaskedMean(keras.layers.Layer):  # type: ignore[misc]
    """The mean over real tokens: hidden ``[B, T, width]`` and ``RealTokens`` to ``[B, width]``."""

    def call(self, hidden: Any, real: Any) -> Any:
        total = ops.sum(hidden * ops.expand_dims(real, -1), axis=1)
        return total / ops.sum(real, axis=1, keepdims=True)


@register
class ClassToken(keras.layers.Layer):  # type: ignore[misc]
    """A learned class token before the patches, and learned positions.

    Maps ``[B, N, width]`` to ``[B, N + 1, width]``; Dosovitskiy et al. 2021, equation 1.
    """

    def build(self, patches_shape: Any) -> None:
        _, patches, width = patches_shape
        self.token = self.add_weight(shape=(1, 1, width), initializer="random_normal", name="token")
        self.positions = self.add_weight(
            shape=(1, patches + 1, width), initializer="random_normal", name="positions"
        )

    def call(self, patches: Any) -> Any:
        # Adding the token to a row of padding is cheaper than copying it to every image of a batch
        # whose size is unknown.
        token = ops.pad(self.token, ((0, 0), (0, patches.shape[1]), (0, 0)))
        return ops.pad(patches, ((0, 0), (1, 0), (0, 0))) + (token + self.positions)
