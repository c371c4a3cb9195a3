"""Archives and folders that other model servers load, from versions published here.

A package is a copy, not links: it can be moved to another machine, and nothing that is done to it
reaches the repository. Importing this imports no runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Server:
    """A row of ``SERVERS``.

    Attributes:
        module: has ``write(models, target, base_path)`` and ``check(model)``, which raises
            ``Unsupported`` for a model of a right format that the server still cannot load.
        formats: those that the server itself loads.
        reasons: why not, for formats where it is not plain.
        suffix: of the single file that holds one version; empty where it is a folder of models.
    """

    title: str
    module: str
    formats: tuple[str, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)
    suffix: str = ""


SERVERS: Mapping[str, Server] = {
    "torchserve": Server(
        "TorchServe", "modelport.exporters.packaging.torchserve", ("torchscript",), suffix=".mar"
    ),
    "tfserving": Server(
        "TensorFlow Serving", "modelport.exporters.packaging.tfserving", ("savedmodel",)
    ),
    "triton": Server(
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
