"""Packaging of published versions as archives and folders for other model servers.

A package is a copy, not links: it can be moved to another machine, and changes to it do not affect
the repository. This module imports no runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PackageTarget:
    """A row of ``SERVERS``.

    Attributes:
        module: the module with ``write(models, target, base_path)`` and ``check(model)``, which
            raises ``Unsupported`` for a model that the server cannot load in spite of its format.
        formats: the formats that the server loads.
        reasons: explanations for formats that it unexpectedly does not load.
        suffix: of the single file with one version; empty: a folder of models.
    """

    title: str
    module: str
    formats: tuple[str, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)
    suffix: str = ""


SERVERS: Mapping[str, PackageTarget] = {
    "torchserve": PackageTarget(
        "TorchServe", "modelport.exporters.packaging.torchserve", ("torchscript",), suffix=".mar"
    ),
    "tfserving": PackageTarget(
        "TensorFlow Serving", "modelport.exporters.packaging.tfserving", ("savedmodel",)
    ),
    "triton": PackageTarget(
        "Triton",
        "modelport.exporters.packaging.triton",
        ("onnx", "torchscript", "savedmodel"),
        {
            "tflite": "it has no backend for TFLite",
            "pt2": "its PyTorch backend takes no exported program",
            "aoti": "its torch_aoti platform is beta and takes neither named tensors nor batches",
        },
    ),
}
