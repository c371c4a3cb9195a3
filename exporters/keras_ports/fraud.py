"""The fraud transformer in Keras; ``modelport.exporters.models.fraud`` is the original."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from modelport.exporters.keras_ports import KerasPort, Link, layers
from modelport.exporters.keras_ports.weights import dense, joint_projections, layer_norm, same
from modelport.exporters.models.fraud import LAYER_NORM_EPS
from modelport.exporters.runtime.tensorflow_runtime import keras

ops = keras.ops


def _build(kwargs: Mapping[str, Any], dtype: str) -> Any:
    width, max_positions = kwargs["d_model"], kwargs["max_positions"]
    tokens = keras.Input((None,), dtype="int64", name="tokens")
    seq_lens = keras.Input((), dtype="int64", name="seq_lens")
    embedding = keras.layers.Embedding(kwargs["vocab_size"], width, dtype=dtype, name="embedding")
    positions = layers.Positions(max_positions, width, dtype=dtype, name="positions")
    real = layers.RealTokens(dtype=dtype, name="real_tokens")(tokens, seq_lens)
    bias = layers.KeyBias(dtype=dtype, name="key_bias")(real)
    hidden = embedding(tokens) + positions(tokens)
    for i in range(kwargs["num_layers"]):
        hidden = _encoder_layer(hidden, bias, f"encoder.layers.{i}", kwargs, dtype)
    pooled = layers.MaskedMean(dtype="float32", name="pooled")(hidden, real)
    scores = keras.layers.Dense(1, dtype=dtype, name="head")(pooled)
    probability = ops.sigmoid(ops.cast(ops.squeeze(scores, -1), "float32"))
    return keras.Model(
        {"tokens": tokens, "seq_lens": seq_lens}, {"probability": probability}, name="fraud"
    )


def _encoder_layer(hidden: Any, bias: Any, path: str, kwargs: Mapping[str, Any], dtype: str) -> Any:
    """``nn.TransformerEncoderLayer`` with PyTorch's defaults: ReLU, norm after each sum."""
    width = kwargs["d_model"]

    def dense(units: int, name: str) -> Any:
        return keras.layers.Dense(units, dtype=dtype, name=f"{path}.{name}")

    def norm(name: str) -> Any:
        return keras.layers.LayerNormalization(
            epsilon=LAYER_NORM_EPS, dtype=dtype, name=f"{path}.{name}"
        )

    projected = [dense(width, f"self_attn.{part}")(hidden) for part in ("query", "key", "value")]
    attention = layers.Attention(kwargs["nhead"], dtype=dtype, name=f"{path}.self_attn")
    attended = dense(width, "self_attn.out_proj")(attention(*projected, bias))
    hidden = norm("norm1")(hidden + attended)
    expanded = ops.relu(dense(kwargs["dim_feedforward"], "linear1")(hidden))
    return norm("norm2")(hidden + dense(width, "linear2")(expanded))


def _links(kwargs: Mapping[str, Any]) -> list[Link]:
    links = [
        same("embedding", "embedding.weight", "embeddings"),
        same("positions", "positions.weight", "embeddings"),
    ]
    for i in range(kwargs["num_layers"]):
        path = f"encoder.layers.{i}"
        links += joint_projections(
            f"{path}.self_attn",
            f"{path}.self_attn.in_proj_weight",
            f"{path}.self_attn.in_proj_bias",
        )
        for name in ("self_attn.out_proj", "linear1", "linear2"):
            links += dense(f"{path}.{name}")
        for name in ("norm1", "norm2"):
            links += layer_norm(f"{path}.{name}")
    return [*links, *dense("head")]


def _probes(kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from (("embedding", "embedding"), ("positions", "positions"))
    for i in range(kwargs["num_layers"]):
        path = f"encoder.layers.{i}"
        yield f"{path}.self_attn", f"{path}.self_attn.out_proj"
        for name in ("norm1", "linear1", "linear2", "norm2"):
            yield f"{path}.{name}", f"{path}.{name}"
    yield "head", "head"


PORT = KerasPort(_build, _links, lambda kwargs: tuple(_probes(kwargs)))
