# mypy: disable-error-code=no-any-return
"""Modules written for the sweep: what a converter finds hard, and models of other fields.

Each class is exported by ``--model tests.sweep.modules:NAME`` and the inputs in ``MODELS``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROW = "x:FP32[16]"
SERIES = "x:FP32[time=2..32,8]"
IMAGE = "x:FP32[3,32,32]"
ANY_IMAGE = "x:FP32[3,height=16..48,width=16..48]"
TOKENS = "ids:INT64[sequence=1..32]=0..98"


class Perceptron(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


class DictOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.linear(x)
        return {"logits": logits, "probabilities": logits.softmax(-1)}


@dataclasses.dataclass
class Detection:
    boxes: Tensor
    scores: Tensor


class DataclassOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Detection:
        found = self.body(x).reshape(-1, 4, 6)
        return Detection(found[..., :4].sigmoid(), found[..., 4:])


class NestedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], None]:
        hidden = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            hidden.append(x)
        return x, hidden, None


class KeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, *, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x) * scale


class LongShortTerm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


class BothDirections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 6, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(8, 12, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[1][-1])


class TransformerClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        padding = attention_mask == 0
        hidden = self.encoder(self.embed(ids), src_key_padding_mask=padding)
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * weights).sum(1) / weights.sum(1).clamp(min=1))


class TransposedConvolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1),
            nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1, groups=2),
        )


class DilatedConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv1d(8, 8, 3, padding=2**i, dilation=2**i) for i in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        return x.mean(-1)


class Volumes(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv3d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool3d(2),
            nn.Flatten(),
            nn.Linear(256, 3),
        )


class SmallUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, padding=1)
        self.deep = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.Conv2d(16, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.down(x))
        deep = torch.relu(self.deep(functional.max_pool2d(first, 2)))
        wide = functional.interpolate(
            deep, size=first.shape[-2:], mode="bilinear", align_corners=False
        )
        return self.up(torch.cat([first, wide], 1))


class AnySizeClassifier(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU6(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
            nn.BatchNorm2d(8),
            nn.Hardswish(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 5),
        )


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.squeeze = nn.Conv2d(8, 2, 1)
        self.excite = nn.Conv2d(2, 8, 1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.silu(self.norm(self.stem(x)))
        gate = self.excite(torch.relu(self.squeeze(x.mean((2, 3), keepdim=True))))
        return (x * gate.sigmoid()).amax((2, 3))


class SubPixels(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect"),
            nn.InstanceNorm2d(16, affine=True),
            nn.PReLU(16),
            nn.Conv2d(16, 12, 3, padding=1),
            nn.PixelShuffle(2),
        )


class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 6))

    def forward(self, x: Tensor) -> Tensor:
        theta = 0.1 * self.where(x).tanh().reshape(-1, 2, 3) + torch.eye(2, 3)
        grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
        return functional.grid_sample(x, grid, align_corners=False)


class Recommender(nn.Module):
    """Dense features and categories that interact (Naumov et al., arXiv 1906.00091)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(3))
        self.dense = nn.Linear(16, 8)
        self.top = nn.Linear(14, 1)

    def forward(self, x: Tensor, categories: Tensor) -> Tensor:
        rows = [self.dense(x), *(t(categories[:, i]) for i, t in enumerate(self.tables))]
        every = torch.stack(rows, 1)
        products = every @ every.transpose(1, 2)
        i, j = torch.tril_indices(4, 4, offset=-1).unbind(0)
        return self.top(torch.cat([rows[0], products[:, i, j]], 1)).sigmoid()


class CrossNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.crosses = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for cross in self.crosses:
            x = first * cross(x) + x
        return x


class FactorizationMachine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.randn(16, 4) * 0.1)
        self.linear = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        square = (x @ self.factors).pow(2) - x.pow(2) @ self.factors.pow(2)
        return torch.sigmoid(self.linear(x) + 0.5 * square.sum(-1, keepdim=True))


class TopExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.Parameter(torch.randn(4, 16, 8) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.gate(x).softmax(-1).topk(2, dim=-1)
        chosen = self.experts[index]
        return torch.einsum("bi,bkio,bk->bo", x, chosen, weight)


class Ranking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(16, 20)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = self.score(x).topk(5)
        return values, indices


class GraphConvolution(nn.Module):
    """Messages along the edges of one graph; it has no batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(8, 8)
        self.update = nn.Linear(16, 4)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        sent = self.message(nodes)[source]
        got = torch.zeros_like(nodes).index_add(0, target, sent)
        return self.update(torch.cat([nodes, got], -1))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.left(y), lambda y: self.right(y), (x,))


class SelectiveScan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        decay = functional.logsigmoid(self.gate(x)).cumsum(1).clamp(min=-20.0)
        weights = (-decay).exp() * self.value(x)
        return (weights.cumsum(1) * decay.exp()).tanh()


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.frequencies: Tensor
        self.register_buffer("frequencies", 1.0 / 100 ** (torch.arange(0, 8, 2) / 8), False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        angles = torch.arange(x.shape[1]).float()[:, None] * self.frequencies
        sine, cosine = angles.sin(), angles.cos()

        def turned(y: Tensor) -> Tensor:
            even, odd = y[..., ::2], y[..., 1::2]
            pair = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
            return pair.flatten(-2)

        return functional.scaled_dot_product_attention(
            turned(query), turned(key), value, is_causal=True
        )


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.rfft(x).abs().log1p())


class MixtureDensity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, mean, scale = self.body(x).chunk(3, -1)
        return weight.log_softmax(-1), mean, functional.softplus(scale) + 1e-3


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(16, 4)
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.encode(x).relu(), self.encode.weight.t(), self.bias)


class WeightNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).amax(-1)


class BrainFloat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(self.linear.weight.dtype)).float()


class Quantiles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        first, rest = self.body(x).split([1, 4], -1)
        return torch.cat([first, first + functional.softplus(rest).cumsum(-1)], -1)


class SiameseDistance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 8), nn.Tanh())

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self.body(left), self.body(right)
        return functional.cosine_similarity(a, b, dim=-1).unsqueeze(-1)


class ScalarPerRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).squeeze(-1)


@dataclass(frozen=True, slots=True)
class WrittenModule:
    """A module of this file, what an exporter meets in it, and the arguments of its export."""

    kind: str
    factory: type[nn.Module]
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.factory.__name__

    def write(self, folder: Path) -> list[str]:
        """Write the weights; the arguments name this module's class as factory."""
        from safetensors.torch import save_model

        torch.manual_seed(0)
        file = folder / "model.safetensors"
        save_model(self.factory(), str(file))
        return [str(file), "--model", f"{__name__}:{self.name}", *self.arguments]

    def original(self, folder: Path) -> Callable[[Mapping[str, Any]], Any]:
        """Build the module again and load its weights, as float32."""
        from safetensors.torch import load_model

        module = self.factory()
        load_model(module, str(folder / "model.safetensors"))
        module.eval().float()  # as certificates say: weights in half precision compute in float32
        keywords = self.factory is KeywordOnly

        def run(inputs: Mapping[str, Any]) -> Any:
            return module(**inputs) if keywords else module(*inputs.values())

        return run


def _row(
    kind: str, factory: type[nn.Module], *inputs: str, more: tuple[str, ...] = ()
) -> WrittenModule:
    flags = tuple(part for text in inputs for part in ("--input", text))
    return WrittenModule(kind, factory, (*flags, *more))


MODELS: tuple[WrittenModule, ...] = (
    _row("layers", Perceptron, ROW),
    _row("outputs", DictOutput, ROW),
    _row("outputs", DataclassOutput, ROW),
    _row("outputs", NestedOutput, ROW),
    _row("outputs", KeywordOnly, ROW, "scale:FP32[1]"),
    _row("recurrent", LongShortTerm, SERIES),
    _row("recurrent", BothDirections, SERIES),
    _row("recurrent", Gated, SERIES),
    _row("attention", TransformerClassifier, TOKENS, "attention_mask:INT64[sequence]=0..1"),
    _row("convolutions", TransposedConvolutions, IMAGE),
    _row("convolutions", DilatedConvolutions, SERIES),
    _row("convolutions", Volumes, "x:FP32[1,8,8,8]"),
    _row("open images", SmallUNet, ANY_IMAGE),
    _row("open images", AnySizeClassifier, ANY_IMAGE),
    _row("convolutions", SqueezeExcite, IMAGE),
    _row("resampling", SubPixels, IMAGE),
    _row("resampling", SpatialTransformer, IMAGE),
    _row("tables", Recommender, ROW, "categories:INT64[3]=0..49"),
    _row("tables", CrossNetwork, ROW),
    _row("tables", FactorizationMachine, ROW),
    _row("order", TopExperts, ROW),
    _row("order", Ranking, ROW),
    _row(
        "graph",
        GraphConvolution,
        "nodes:FP32[12,8]",
        "source:INT64[edges=1..40]=0..11",
        "target:INT64[edges]=0..11",
        more=("--max-batch-size", "0"),
    ),
    # The sum over all rows decides, so that a row is alone.
    _row("branches", Branches, ROW, more=("--max-batch-size", "1")),
    _row("cumulative", SelectiveScan, SERIES),
    _row("attention", Rotary, SERIES),
    _row("spectral", Spectrum, ROW),
    _row("distribution", MixtureDensity, ROW),
    _row("shared weights", TiedAutoencoder, ROW),
    _row("parametrized weights", WeightNormed, SERIES),
    _row("half precision", BrainFloat, ROW),
    _row("order", Quantiles, ROW),
    _row("several inputs", SiameseDistance, "left:FP32[16]", "right:FP32[16]"),
    _row("outputs", ScalarPerRow, ROW),
)
