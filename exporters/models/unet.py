"""A U-Net for keypoint heat maps, with TensorFlow's "SAME" padding at every image size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from modelport.exporters.model_spec import ModelSpec, Shape, count_blocks
from modelport.gateway.errors import UsageError
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec

DEFAULT_MAX_SIZE = 256
STRIDE = 2


def _signature(module: Any, max_batch_size: int) -> ModelSignature:
    dims = ("height", "width")
    return ModelSignature(
        inputs=(TensorSpec("image", Datatype.FP32, (module.in_channels, *dims), 0.0, 1.0),),
        outputs=(TensorSpec("heatmaps", Datatype.FP32, (module.keypoints, *dims)),),
        max_batch_size=max_batch_size,
        axes={name: Axis(name, module.min_size, module.max_size) for name in dims},
    )


def _infer_kwargs(shapes: Mapping[str, Shape], given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        first = shapes["encoder.0.0.weight"]
        levels = count_blocks(shapes, "encoder.")
        return {
            "in_channels": first[1],
            "keypoints": shapes["head.weight"][0],
            "features": [shapes[f"encoder.{i}.0.weight"][0] for i in range(levels)],
            "kernel_size": first[2],
            "upsampling_kernel_size": shapes["upsampling.0.weight"][2],
        }
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(
            f"the checkpoint is not a U-Net's of this kind (no usable {error}); "
            "check --model, or give every hyper-parameter with --model-kwargs"
        ) from error


class SameConvTranspose2d(nn.ConvTranspose2d):
    """``tf.nn.conv2d_transpose(..., padding="SAME")``: ``[B, C, h, w]`` to ``[B, D, H, W]``.

    The stride is 2. TensorFlow defines it as the gradient of the convolution from ``H`` to
    ``h = ceil(H / 2)``, so its crop depends on whether ``H`` is even: PyTorch's ``padding``
    cannot express that.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride=STRIDE)

    def forward(self, image: Tensor, size: Tensor) -> Tensor:  # type: ignore[override]
        """Upsample ``image`` to the last two dims, ``H`` and ``W``, of the tensor ``size``."""
        full = super().forward(image)
        for dim in (2, 3):
            length = size.shape[dim]
            # The convolution pads (h - 1) * 2 + kernel - H in total, the smaller half in front.
            start = (self.kernel_size[0] - STRIDE + length % STRIDE) // 2
            # For a slice torch.export would have to prove that it lies inside, which it cannot.
            kept = start + torch.arange(length, device=full.device)
            full = full.index_select(dim, kept)
        return full


class SamePool2d(nn.MaxPool2d):
    """``tf.nn.max_pool2d(..., padding="SAME")`` by 2, stride 2."""

    def __init__(self) -> None:
        super().__init__(STRIDE)

    def forward(self, image: Tensor) -> Tensor:
        # Padding added to an even size falls into no window.
        pooled: Tensor = super().forward(nn.functional.pad(image, (0, 1, 0, 1), value=-torch.inf))
        return pooled


class UNet(nn.Module):
    """Ronneberger et al. 2015, "U-Net", with one heat map per keypoint at the image's resolution.

    Each level has two 3x3 convolutions with ReLU; max pooling halves and transposed convolution
    doubles. All pad as TensorFlow's "SAME" (at the end, if uneven), so that weights trained there
    compute the same here, at odd sizes too.
    """

    modelport_spec = ModelSpec(
        name="unet",
        signature=_signature,
        infer_kwargs=_infer_kwargs,
        atol=1e-5,
        rtol=1e-4,
        parameters={"image.layout": "CHW"},  # pixels as fractions of full scale
    )

    def __init__(
        self,
        in_channels: int,
        keypoints: int,
        features: Sequence[int],
        kernel_size: int = 3,
        upsampling_kernel_size: int = 2,
        max_size: int = DEFAULT_MAX_SIZE,
    ) -> None:
        """
        Args:
            features: channels of each level, at full resolution first.
            max_size: the largest height and width of an image.
        """
        if len(features) < 2 or not kernel_size % 2 or upsampling_kernel_size < STRIDE:
            raise ValueError(
                f"features {list(features)} must be two levels or more, kernel_size {kernel_size} "
                f"odd, upsampling_kernel_size {upsampling_kernel_size} at least {STRIDE}"
            )
        # Two pixels at the deepest level, as torch.export treats a 1 as a constant.
        self.min_size = STRIDE ** len(features)
        if max_size < self.min_size:
            raise ValueError(f"max_size {max_size} must be at least {self.min_size}")
        super().__init__()
        self.in_channels = in_channels
        self.keypoints = keypoints
        self.max_size = max_size
        channels = [in_channels, *features]
        self.encoder = nn.ModuleList(
            _convolutions(before, after, kernel_size) for before, after in pairwise(channels)
        )
        self.pool = SamePool2d()
        deep = list(pairwise(reversed(features)))
        self.upsampling = nn.ModuleList(
            SameConvTranspose2d(before, after, upsampling_kernel_size) for before, after in deep
        )
        self.decoder = nn.ModuleList(
            _convolutions(2 * after, after, kernel_size) for _, after in deep
        )
        self.head = nn.Conv2d(features[0], keypoints, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Heat maps, unnormalised.

        Args:
            image: float32 ``[B, in_channels, H, W]``, ``H`` and ``W`` of any size.

        Returns:
            float32 ``[B, keypoints, H, W]``.
        """
        levels: list[Tensor] = []
        hidden = image
        for convolutions in self.encoder:
            hidden = convolutions(self.pool(hidden) if levels else hidden)
            levels.append(hidden)
        levels.pop()
        for upsampling, convolutions in zip(self.upsampling, self.decoder, strict=True):
            level = levels.pop()
            hidden = convolutions(torch.cat([level, upsampling(hidden, level)], dim=1))
        heatmaps: Tensor = self.head(hidden)
        return heatmaps


def _convolutions(in_channels: int, out_channels: int, kernel_size: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, kernel_size, padding=kernel_size // 2),
        nn.ReLU(),
    )
