"""The models of ``make gpu-check``, with random weights, as artifacts in a model repository."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modelport.exporters.formats import aoti, pt2, registry, torchscript
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.loaded_model import Source
from modelport.exporters.models.fraud import FraudTransformer
from modelport.exporters.models.vit import VisionTransformer
from modelport.exporters.sources import pytorch
from modelport.exporters.tolerance import FP32, Tolerance
from modelport.gateway.repository import config as configuration
from modelport.gateway.types import Array
from modelport.gateway.wire.proto import model_config_pb2 as pb

Drawn = Callable[[np.random.Generator, int], dict[str, Array]]

MAX_BATCH = 16
FORMATS: Mapping[str, Callable[[Source, Path, ExportTarget], None]] = {
    "torchscript": torchscript.export,
    "pt2": pt2.export,
    "aoti": aoti.export,
}
#: The kind of instances on a device.
KINDS = {"cuda": pb.ModelInstanceGroup.KIND_GPU, "cpu": pb.ModelInstanceGroup.KIND_CPU}


@dataclass(frozen=True)
class GpuSubject:
    """A model on the CPU, with what to ask it."""

    name: str
    source: Source
    drawn: Drawn

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance of the model's certificates."""
        spec = self.source.spec
        return Tolerance(spec.atol or FP32.atol, spec.rtol or FP32.rtol)

    def rows(self, count: int, seed: int) -> dict[str, Array]:
        return self.drawn(np.random.default_rng(seed), count)

    def on_the_wire(self, rows: Mapping[str, Array]) -> dict[str, Array]:
        """``rows`` in the shapes that clients send."""
        specs = {spec.name: spec for spec in self.source.signature.inputs}
        return {
            name: array
            if specs[name].reshape is None
            else array.reshape(len(array), *specs[name].wire_dims)
            for name, array in rows.items()
        }


def _fraud_rows(random: np.random.Generator, count: int) -> dict[str, Array]:
    tokens = random.integers(0, 512, (count, 32))
    return {"tokens": tokens, "seq_lens": random.integers(1, 33, count)}


def _images(channels: int, size: int) -> Drawn:
    def drawn(random: np.random.Generator, count: int) -> dict[str, Array]:
        return {"image": random.standard_normal((count, channels, size, size), dtype=np.float32)}

    return drawn


def _fraud() -> tuple[nn.Module, Drawn]:
    return FraudTransformer(512, 64, 4, 2, 128, 64), _fraud_rows


def _vit() -> tuple[nn.Module, Drawn]:
    return VisionTransformer(8, 2, 1, 10, dim=64, depth=4, num_heads=4, mlp_dim=128), _images(1, 8)


def _vit_b16(depth: int = 12) -> tuple[nn.Module, Drawn]:
    sizes = {"dim": 768, "num_heads": 12, "mlp_dim": 3072}
    return VisionTransformer(224, 16, 3, 1000, depth=depth, **sizes), _images(3, 224)


#: The demo's models, ViT-B/16, and the first blocks of that for a processor.
MODELS: Mapping[str, Callable[[], tuple[nn.Module, Drawn]]] = {
    "fraud": _fraud,
    "vit": _vit,
    "vit-b16": _vit_b16,
    "vit-b16-short": lambda: _vit_b16(2),
}


def subject(name: str) -> GpuSubject:
    """The model ``name``, the same in each process."""
    torch.manual_seed(0)
    module, drawn = MODELS[name]()
    spec = type(module).modelport_spec  # type: ignore[attr-defined]
    source = pytorch.source(module.eval(), spec, spec.signature(module, MAX_BATCH))
    return GpuSubject(name, source, drawn)


def publish(repository: Path, subject: GpuSubject, form: str, device: str) -> None:
    """Write the artifact, with instances on ``device``."""
    name = f"{subject.name}-{form}"
    target = ExportTarget(device=device if form == "aoti" else "cpu")
    platform = registry.find_format(form).platform
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    FORMATS[form](subject.source, folder / platform.default_filename, target)
    config = configuration.build(name, platform, subject.source.signature)
    config.dynamic_batching.max_queue_delay_microseconds = 500
    config.instance_group.add(kind=KINDS[device], count=1)
    (folder.parent / "config.pbtxt").write_text(configuration.to_text(config))


def variant(repository: Path, of: str, name: str, **group: Any) -> str:
    """The same artifact as the model ``of``, with another group of instances."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    for file in (repository / of / "1").iterdir():
        os.link(file, folder / file.name)
    config = configuration.parse((repository / of / "config.pbtxt").read_text())
    config.name = name
    del config.instance_group[:]
    config.instance_group.add(**group)
    (folder.parent / "config.pbtxt").write_text(configuration.to_text(config))
    return name


if __name__ == "__main__":
    _, folder, model, form, device = sys.argv
    publish(Path(folder), subject(model), form, device)
