"""Scaled dot-product attention."""

from __future__ import annotations

import math
from typing import Any

from modelport.exporters.lowering.datatypes import cast
from modelport.exporters.lowering.operators.layout import reshape
from modelport.exporters.lowering.registry import lowers
from modelport.exporters.lowering.sizes import Size, size, sizes
from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.gateway.errors import Unsupported

#: A score that leaves nothing of a key's weight, and yet is a number if all have it.
UNSEEN = -1e30


@lowers("scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention; a query that may see no key gets zeros, as in PyTorch."""
    if dropout_p:
        raise Unsupported("it applies dropout; set dropout_p to 0 outside of training")
    if query.dtype in (tf.float16, tf.bfloat16):  # PyTorch's kernels sum in float32
        wide = (tf.cast(x, tf.float32) for x in (query, key, value))
        result = scaled_dot_product_attention(
            *wide, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        return tf.cast(result, query.dtype)
    grouped = enable_gqa and size(query, -3) != size(key, -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    query = query * cast(factor, query.dtype)
    scores = _by_group(query, key, grouped, transpose=True)
    if is_causal:
        scores = tf.where(
            _causal(size(query, -2), size(key, -2)), scores, cast(float("-inf"), scores.dtype)
        )
    if attn_mask is None:
        return _by_group(tf.nn.softmax(scores), value, grouped, transpose=False)
    bias, seeing = _bias(attn_mask, scores.dtype)
    weights = tf.nn.softmax(scores + bias)
    return _by_group(weights, value, grouped, transpose=False) * seeing


def _bias(mask: Any, dtype: Any) -> tuple[Any, Any]:
    """The finite bias of ``mask`` on the scores, and 1 for queries that see a key, 0 for others.

    Both have the size of the mask, which is small beside the scores.
    """
    unseen = cast(UNSEEN, dtype)
    if mask.dtype == tf.bool:
        bias = tf.where(mask, cast(0.0, dtype), unseen)
        return bias, tf.cast(tf.reduce_any(mask, -1, keepdims=True), dtype)
    mask = cast(mask, dtype)
    seeing = tf.reduce_max(mask, -1, keepdims=True) > float("-inf")
    return tf.maximum(mask, unseen), tf.cast(seeing, dtype)


def _causal(queries: Size, keys: Size) -> Any:
    """A query sees the keys up to its own position, counted from the first."""
    return tf.range(queries)[:, tf.newaxis] >= tf.range(keys)[tf.newaxis]


def _by_group(left: Any, right: Any, grouped: bool, transpose: bool) -> Any:
    """``left @ right``, where a head of ``right`` may serve several of ``left``.

    Their rows are put below each other, so that no head is repeated.
    """
    if not grouped:
        return tf.matmul(left, right, transpose_b=transpose)
    *batch, heads, rows, columns = sizes(left)
    shared = size(right, -3)
    stacked = reshape(left, [*batch, shared, heads // shared * rows, columns])
    product = tf.matmul(stacked, right, transpose_b=transpose)
    return reshape(product, [*batch, heads, rows, size(product, -1)])


@lowers("_scaled_dot_product_flash_attention_for_cpu")
def flash_attention_for_cpu(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any]:
    """Attention and a second result that serves training alone."""
    result = scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa=True
    )
    return result, None
