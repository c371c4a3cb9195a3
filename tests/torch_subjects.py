"""PyTorch models to export, how far an artifact is from them, and archives made by another hand."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modelport.exporters.formats.base import ParitySession
from modelport.exporters.loaded_model import Source
from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.requests.random_inputs import draw, name_axes, sizes_of
from modelport.exporters.sources.pytorch import source
from modelport.gateway.types import Array, Axis, Datatype, ModelSignature, TensorSpec


def fp32(name: str, *dims: int | str) -> TensorSpec:
    return TensorSpec(name, Datatype.FP32, dims)


def subject(module: Any, signature: ModelSignature | None = None) -> Source:
    """``module`` with its own declaration, or as a user's model with ``signature``."""
    if signature is None:
        return source(module, module.modelport_spec, module.modelport_spec.signature(module, 8))
    return source(module, ModelSpec("m", lambda module, batch: signature), signature)


class SumAndDifference(nn.Module):
    """Two inputs, two outputs, whatever the signature calls them."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


class Recurrent(nn.Module):
    """``[B, n, 3]`` to ``[B, n, 2]``; its loop runs as often as ``n`` is long."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.gru = nn.GRU(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.gru(self.lstm(x)[0])[0]
        return hidden


RECURRENT = ModelSignature((fp32("x", "n", 3),), (fp32("y", "n", 2),), 4, {"n": Axis("n", 1, 9)})


def grid(signature: ModelSignature) -> Iterator[dict[str, Array]]:
    """Inputs at batch 1, 2 and the largest, each with every axis at three sizes."""
    named = name_axes(signature)
    spans = [sizes_of(axis) for axis in named.axes.values()]
    for seed, batch in enumerate((1, 2, signature.max_batch_size)):
        for sizes in zip(*spans, strict=True) if spans else [()]:
            chosen = dict(zip(named.axes, sizes, strict=True))
            yield draw(named, batch, chosen, np.random.default_rng(seed))


def worst(subject: Source, session: ParitySession) -> float:
    """The largest error over the grid; names, datatypes and shapes must be the same."""
    errors = []
    for inputs in grid(subject.signature):
        expected, actual = subject.reference(inputs), session(inputs)
        assert actual.keys() == expected.keys()  # a SavedModel keeps no order
        for name, array in expected.items():
            assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape)
            errors.append(np.abs(actual[name] - array).max(initial=0))
    return float(max(errors))


def rewritten(path: Path, changes: dict[str, bytes | None]) -> Path:
    """A copy of an archive with records replaced, or left out, by their names without the root."""
    copy = path.with_name(f"changed{path.suffix}")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(copy, "w") as new:
        for info in old.infolist():
            content = changes.get(info.filename.partition("/")[2], old.read(info))
            if content is not None:
                new.writestr(info.filename, content)
    return copy
