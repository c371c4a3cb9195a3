"""Convolutions whose number of groups is not known, as it follows the batch.

A generator that modulates the weights of a convolution by each image's style, such as StyleGAN's,
makes each image of a batch a group.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelport.exporters.decompositions.table import decomposes

aten = torch.ops.aten


@decomposes(aten.convolution.default)
def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: Any,
) -> Any:
    """A product of the weights and of what lies below the kernel, for each group."""
    if isinstance(groups, int) or not all(isinstance(size, int) for size in weight.shape[2:]):
        return NotImplemented
    axes = weight.dim() - 2
    stride, padding, dilation, output_padding = (
        list(each) * axes if len(each) == 1 else list(each)
        for each in (stride, padding, dilation, output_padding)
    )
    kernel = weight.shape[2:]
    margins = [(p, p) for p in padding]
    filters = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    if transposed:  # a convolution of x with zeros between its elements, by the mirrored kernel
        filters = filters.transpose(1, 2).flip(*range(3, 3 + axes))
        for axis, step in enumerate(stride, start=2):
            x = _with_zeros_between(x, axis, step)
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        margins = [
            (r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)
        ]
        stride = [1] * axes
    x = aten.constant_pad_nd.default(x, [each for pair in reversed(margins) for each in pair])
    batch, channels, *sizes = x.shape
    wanted = [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, d, s in zip(sizes, kernel, dilation, stride, strict=True)
    ]
    below = []
    for place in itertools.product(*map(range, kernel)):
        part = x
        for axis, (p, d, s, size) in enumerate(
            zip(place, dilation, stride, wanted, strict=True), start=2
        ):
            part = part.narrow(axis, p * d, (size - 1) * s + 1)
            part = part[(slice(None),) * axis + (slice(None, None, s),)] if s > 1 else part
        below.append(part.reshape(batch, groups, channels // groups, -1))
    order = filters.permute(0, 1, *range(3, 3 + axes), 2)
    found = order.reshape(groups, filters.shape[1], -1) @ torch.cat(below, 2)
    found = found.reshape(batch, -1, *wanted)
    return found if bias is None else found + bias.reshape(-1, *[1] * axes)


def _with_zeros_between(x: Tensor, axis: int, step: int) -> Tensor:
    if step == 1:
        return x
    length = (x.shape[axis] - 1) * step + 1
    x = x.unsqueeze(axis + 1)
    after = [0, 0] * (x.dim() - axis - 2) + [0, step - 1]
    wide: Tensor = aten.constant_pad_nd.default(x, after)
    return wide.flatten(axis, axis + 1).narrow(axis, 0, length)
