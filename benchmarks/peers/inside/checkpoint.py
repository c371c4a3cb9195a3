"""Runs in modelport's own environment: checkpoint.py NAME FILE writes a checkpoint to export.

Random weights under the names that `modelport export --model fraud` and `--model vit` read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

FRAUD = {
    "vocab_size": 512,
    "d_model": 128,
    "nhead": 8,
    "num_layers": 4,
    "dim_feedforward": 512,
    "max_positions": 64,
}
VIT_B16 = {
    "image_size": 224,
    "patch_size": 16,
    "in_channels": 3,
    "num_classes": 1000,
    "dim": 768,
    "depth": 12,
    "num_heads": 12,
    "mlp_dim": 3072,
}
SCALE = 0.02

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def linear(name: str, outputs: int, inputs: int) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def norm(name: str, size: int) -> Shapes:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


def fraud() -> Shapes:
    size, hidden = FRAUD["d_model"], FRAUD["dim_feedforward"]
    yield "embedding.weight", (FRAUD["vocab_size"], size)
    yield "positions.weight", (FRAUD["max_positions"], size)
    for number in range(FRAUD["num_layers"]):
        layer = f"encoder.layers.{number}"
        yield f"{layer}.self_attn.in_proj_weight", (3 * size, size)
        yield f"{layer}.self_attn.in_proj_bias", (3 * size,)
        yield from linear(f"{layer}.self_attn.out_proj", size, size)
        yield from linear(f"{layer}.linear1", hidden, size)
        yield from linear(f"{layer}.linear2", size, hidden)
        yield from norm(f"{layer}.norm1", size)
        yield from norm(f"{layer}.norm2", size)
    yield from linear("head", 1, size)


def vit() -> Shapes:
    size, hidden, patch = VIT_B16["dim"], VIT_B16["mlp_dim"], VIT_B16["patch_size"]
    patches = (VIT_B16["image_size"] // patch) ** 2
    yield "cls_token", (1, 1, size)
    yield "pos_embed", (1, patches + 1, size)
    yield "patch_embed.proj.weight", (size, VIT_B16["in_channels"], patch, patch)
    yield "patch_embed.proj.bias", (size,)
    for number in range(VIT_B16["depth"]):
        block = f"blocks.{number}"
        yield from norm(f"{block}.norm1", size)
        yield from linear(f"{block}.attn.qkv", 3 * size, size)
        yield from linear(f"{block}.attn.proj", size, size)
        yield from norm(f"{block}.norm2", size)
        yield from linear(f"{block}.mlp.fc1", hidden, size)
        yield from linear(f"{block}.mlp.fc2", size, hidden)
    yield from norm("norm", size)
    yield from linear("head", VIT_B16["num_classes"], size)


CHECKPOINTS = {"fraud128": (fraud, FRAUD), "vit_b16": (vit, VIT_B16)}


def main(name: str, file: str) -> None:
    shapes, kwargs = CHECKPOINTS[name]
    generator = torch.Generator().manual_seed(0)
    state = {key: torch.randn(shape, generator=generator) * SCALE for key, shape in shapes()}
    for key, tensor in state.items():
        if "norm" in key and key.endswith("weight"):
            tensor += 1
    torch.save({"model_state_dict": state, "model_kwargs": kwargs}, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
