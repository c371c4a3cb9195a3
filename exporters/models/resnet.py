"""ResNet-50, -101 and -152 with torchvision's parameter names, so that its checkpoints load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from modelport.exporters.model_spec import (
    Decision,
    ModelSpec,
    Shape,
    classifies_images,
    count_blocks,
)
from modelport.gateway.errors import UsageError

STAGES = 4
EXPANSION = 4  # ratio of a bottleneck's output width to its inner width
DEFAULT_IMAGE_SIZE = 224


def _infer_kwargs(shapes: Mapping[str, Shape], given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if "layer1.0.conv3.weight" not in shapes:
            raise KeyError("layer1.0.conv3.weight")  # ResNet-18 and -34 have basic blocks
        width, in_channels, _, _ = shapes["conv1.weight"]
        return {
            "num_classes": shapes["fc.weight"][0],
            "in_channels": in_channels,
            "width": width,
            "layers": [count_blocks(shapes, f"layer{i}.") for i in range(1, STAGES + 1)],
        }
    except (LookupError, ValueError) as error:
        raise UsageError(
            f"the checkpoint is not a ResNet-50's, -101's or -152's (no usable {error}); "
            "check --model, or give every hyper-parameter with --model-kwargs"
        ) from error


class Bottleneck(nn.Module):
    """A bottleneck block: ``[B, C, H, W]`` to ``[B, 4 * width, H / stride, W / stride]``.

    The stride is in the 3x3 convolution, as in torchvision's checkpoints (version 1.5); He et al.
    have it in the first 1x1.
    """

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * EXPANSION
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.relu(self.bn1(self.conv1(image)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        hidden = self.bn3(self.conv3(hidden))
        shortcut = image if self.downsample is None else self.downsample(image)
        added: Tensor = self.relu(hidden + shortcut)
        return added


class ResNet50(nn.Module):
    """He et al. 2016, "Deep Residual Learning for Image Recognition", with bottleneck blocks.

    ``layers`` (3, 4, 6, 3) is ResNet-50, (3, 4, 23, 3) ResNet-101, (3, 8, 36, 3) ResNet-152.
    """

    modelport_spec = ModelSpec(
        name="resnet50",
        signature=classifies_images,
        infer_kwargs=_infer_kwargs,
        atol=1e-4,
        rtol=1e-4,
        decision=Decision("logits"),
        # torchvision's for ImageNet: pixels as fractions of full scale, then (x - mean) / std.
        parameters={
            "image.layout": "CHW",
            "image.mean": "0.485,0.456,0.406",
            "image.std": "0.229,0.224,0.225",
        },
    )

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        width: int,
        layers: Sequence[int],
        image_size: int = DEFAULT_IMAGE_SIZE,
    ) -> None:
        if len(layers) != STAGES or min(layers) < 1:
            raise ValueError(f"layers {list(layers)} must be {STAGES} positive numbers")
        super().__init__()
        self.num_classes = num_classes
        self.in_channels = in_channels
        self.image_size = image_size
        self.conv1 = nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(width, width, layers[0], stride=1)
        self.layer2 = _stage(4 * width, 2 * width, layers[1], stride=2)
        self.layer3 = _stage(8 * width, 4 * width, layers[2], stride=2)
        self.layer4 = _stage(16 * width, 8 * width, layers[3], stride=2)
        self.fc = nn.Linear(8 * width * EXPANSION, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        """Class scores, unnormalised.

        Args:
            image: float32 ``[B, in_channels, image_size, image_size]``.

        Returns:
            float32 ``[B, num_classes]``.
        """
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(image))))
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        logits: Tensor = self.fc(hidden.mean(dim=(2, 3)))
        return logits


def _stage(in_channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(in_channels, width, stride)
    rest = (Bottleneck(width * EXPANSION, width, 1) for _ in range(blocks - 1))
    return nn.Sequential(first, *rest)
