"""A vision transformer with ``timm``'s parameter names, so that its checkpoints load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modelport.exporters.model_spec import (
    Decision,
    ModelSpec,
    Shape,
    classifies_images,
    count_blocks,
)
from modelport.gateway.errors import UsageError

LAYER_NORM_EPS = 1e-6  # timm's; PyTorch's default is 1e-5, Hugging Face's configurations have 1e-12

#: Heads of the published sizes by width: Ti, S, B, L (Dosovitskiy et al. 2021 table 1; Touvron et
#: al. 2021 table 1) and H. Other widths need ``num_heads``.
HEADS_BY_WIDTH: Mapping[int, int] = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16}


def _infer_kwargs(shapes: Mapping[str, Shape], given: Mapping[str, Any]) -> dict[str, Any]:
    """All hyper-parameters: from shapes, with square images, and heads by ``HEADS_BY_WIDTH``."""
    try:
        dim, in_channels, patch_size, _ = shapes["patch_embed.proj.weight"]
        inferred = {
            "image_size": math.isqrt(shapes["pos_embed"][1] - 1) * patch_size,
            "patch_size": patch_size,
            "in_channels": in_channels,
            "num_classes": shapes["head.weight"][0],
            "dim": dim,
            "depth": count_blocks(shapes, "blocks."),
            "mlp_dim": shapes["blocks.0.mlp.fc1.weight"][0],
        }
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(
            f"the checkpoint is not a ViT's (no usable {error}); "
            "check --model, or give every hyper-parameter with --model-kwargs"
        ) from error
    if "num_heads" not in given:
        if dim not in HEADS_BY_WIDTH:
            raise UsageError(
                f"the checkpoint does not say how many attention heads its width of {dim} was "
                "trained with; add --model-kwargs '{\"num_heads\": N}'"
            )
        inferred["num_heads"] = HEADS_BY_WIDTH[dim]
    return inferred


class PatchEmbed(nn.Module):
    """Cut ``[B, C, H, W]`` into patches and project each: ``[B, patches, dim]``."""

    def __init__(self, patch_size: int, in_channels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, dim, patch_size, stride=patch_size)

    def forward(self, image: Tensor) -> Tensor:
        patches: Tensor = self.proj(image)
        return patches.flatten(2).transpose(1, 2)


class VitAttention(nn.Module):
    """Multi-head self-attention with one joint projection; keeps ``[B, N, dim]``."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        joint = self.qkv(hidden).unflatten(2, (3, self.num_heads, -1))
        query, key, value = joint.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        projected: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return projected


class Mlp(nn.Module):
    """Two linear layers with a GELU between; keeps ``[B, N, dim]``."""

    def __init__(self, dim: int, mlp_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, mlp_dim)
        self.act = nn.GELU(approximate="none")  # exact, by erf, as in timm's training
        self.fc2 = nn.Linear(mlp_dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        expanded: Tensor = self.fc2(self.act(self.fc1(hidden)))
        return expanded


class Block(nn.Module):
    """Pre-norm transformer block; keeps ``[B, N, dim]``."""

    def __init__(self, dim: int, num_heads: int, mlp_dim: int, layer_norm_eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=layer_norm_eps)
        self.attn = VitAttention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=layer_norm_eps)
        self.mlp = Mlp(dim, mlp_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        attended: Tensor = hidden + self.attn(self.norm1(hidden))
        expanded: Tensor = attended + self.mlp(self.norm2(attended))
        return expanded


class VisionTransformer(nn.Module):
    """Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", classified by the class token."""

    modelport_spec = ModelSpec(
        name="vit",
        signature=classifies_images,
        infer_kwargs=_infer_kwargs,
        atol=5e-5,
        rtol=5e-5,
        decision=Decision("logits"),
        # timm's for these weights: pixels as fractions of full scale, then (x - mean) / std.
        parameters={"image.layout": "CHW", "image.mean": "0.5", "image.std": "0.5"},
        keras_port="modelport.exporters.keras_ports.vit:PORT",
    )

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        in_channels: int,
        num_classes: int,
        dim: int,
        depth: int,
        num_heads: int,
        mlp_dim: int,
        layer_norm_eps: float = LAYER_NORM_EPS,
    ) -> None:
        if image_size % patch_size or dim % num_heads:
            raise ValueError(
                f"image_size {image_size} must be a multiple of patch_size {patch_size}, "
                f"dim {dim} of num_heads {num_heads}"
            )
        super().__init__()
        self.image_size = image_size
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.patch_embed = PatchEmbed(patch_size, in_channels, dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        patches = (image_size // patch_size) ** 2
        self.pos_embed = nn.Parameter(torch.randn(1, patches + 1, dim) * 0.02)
        self.blocks = nn.Sequential(
            *(Block(dim, num_heads, mlp_dim, layer_norm_eps) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(dim, eps=layer_norm_eps)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        """Class scores, unnormalised.

        Args:
            image: float32 ``[B, in_channels, image_size, image_size]``.

        Returns:
            float32 ``[B, num_classes]``.
        """
        patches = self.patch_embed(image)
        first = self.cls_token.expand(image.shape[0], -1, -1)
        hidden = torch.cat([first, patches], dim=1) + self.pos_embed
        hidden = self.norm(self.blocks(hidden))
        logits: Tensor = self.head(hidden[:, 0])
        return logits
