"""The vision transformer in Keras; ``modelport.exporters.models.vit`` is the original."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from modelport.exporters.keras_ports import KerasPort, Link, layers
from modelport.exporters.keras_ports.weights import (
    convolution,
    dense,
    joint_projections,
    layer_norm,
    same,
)
from modelport.exporters.models.vit import LAYER_NORM_EPS
from modelport.exporters.runtime.tensorflow_runtime import keras

ops = keras.ops


def _build(kwargs: Mapping[str, Any], dtype: str) -> Any:
    size, patch_size, width = kwargs["image_size"], kwargs["patch_size"], kwargs["dim"]
    image = keras.Input((kwargs["in_channels"], size, size), dtype="float32", name="image")
    # TensorFlow has no channels-first convolution on a CPU.
    projection = keras.layers.Conv2D(
        width,
        patch_size,
        strides=patch_size,
        data_format="channels_last",
        dtype=dtype,
        name="patch_embed.proj",
    )
    patches = projection(ops.transpose(image, (0, 2, 3, 1)))
    hidden = keras.layers.Reshape((-1, width), dtype=dtype, name="patch_embed")(patches)
    hidden = layers.ClassToken(dtype=dtype, name="class_token")(hidden)
    for i in range(kwargs["depth"]):
        hidden = _block(hidden, f"blocks.{i}", kwargs, dtype)
    hidden = _norm("norm", kwargs, dtype)(hidden)
    scores = keras.layers.Dense(kwargs["num_classes"], dtype=dtype, name="head")(
        ops.take(hidden, 0, axis=1)
    )
    return keras.Model({"image": image}, {"logits": ops.cast(scores, "float32")}, name="vit")


def _block(hidden: Any, path: str, kwargs: Mapping[str, Any], dtype: str) -> Any:
    """A pre-norm transformer block: attention and feed-forward, both with a residual."""
    width = kwargs["dim"]

    def dense(units: int, name: str, activation: Any = None) -> Any:
        return keras.layers.Dense(units, activation=activation, dtype=dtype, name=f"{path}.{name}")

    normed = _norm(f"{path}.norm1", kwargs, dtype)(hidden)
    projected = [dense(width, f"attn.{part}")(normed) for part in ("query", "key", "value")]
    attention = layers.Attention(kwargs["num_heads"], dtype=dtype, name=f"{path}.attn")
    hidden = hidden + dense(width, "attn.proj")(attention(*projected))
    normed = _norm(f"{path}.norm2", kwargs, dtype)(hidden)
    expanded = ops.gelu(dense(kwargs["mlp_dim"], "mlp.fc1")(normed), approximate=False)
    return hidden + dense(width, "mlp.fc2")(expanded)


def _norm(name: str, kwargs: Mapping[str, Any], dtype: str) -> Any:
    epsilon = kwargs.get("layer_norm_eps", LAYER_NORM_EPS)
    return keras.layers.LayerNormalization(epsilon=epsilon, dtype=dtype, name=name)


def _links(kwargs: Mapping[str, Any]) -> list[Link]:
    links = [
        *convolution("patch_embed.proj"),
        same("class_token", "cls_token", "token"),
        same("class_token", "pos_embed", "positions"),
    ]
    for i in range(kwargs["depth"]):
        path = f"blocks.{i}"
        links += layer_norm(f"{path}.norm1")
        links += joint_projections(
            f"{path}.attn", f"{path}.attn.qkv.weight", f"{path}.attn.qkv.bias"
        )
        links += dense(f"{path}.attn.proj")
        links += layer_norm(f"{path}.norm2")
        links += [*dense(f"{path}.mlp.fc1"), *dense(f"{path}.mlp.fc2")]
    return [*links, *layer_norm("norm"), *dense("head")]


def _probes(kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "patch_embed", "patch_embed"
    for i in range(kwargs["depth"]):
        for name in ("norm1", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"):
            yield f"blocks.{i}.{name}", f"blocks.{i}.{name}"
    yield from (("norm", "norm"), ("head", "head"))


PORT = KerasPort(_build, _links, lambda kwargs: tuple(_probes(kwargs)))
