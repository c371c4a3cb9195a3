"""Packaging of published versions as archives and folders for other model servers.

A package is a copy, not links: it can be moved to another machine, and changes to it do not affect
the repository. This module imports no runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from modelport.gateway.backend_registry import platforms


@dataclass(frozen=True, slots=True)
class PackageTarget:
    """A row of ``SERVERS``.

    Attributes:
        module: the module with ``write(models, target, base_path)`` and ``check(model)``, which
            raises ``Unsupported`` for a model that the server cannot load in spite of its format.
        name: the word of ``--for``.
        reasons: explanations for formats that it unexpectedly does not load.
        suffix: of the single file with one version; empty: a folder of models.
    """

    name: str
    title: str
    module: str
    reasons: Mapping[str, str] = field(default_factory=dict)
    suffix: str = ""

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that the server loads, as their platforms say."""
        return tuple(each.format for each in platforms() if self.name in each.servers)


_TARGETS = (
    PackageTarget(
        *("torchserve", "TorchServe", "modelport.exporters.packaging.torchserve"), suffix=".mar"
    ),
    PackageTarget("tfserving", "TensorFlow Serving", "modelport.exporters.packaging.tfserving"),
    PackageTarget(
        *("triton", "Triton", "modelport.exporters.packaging.triton"),
        {
            "tflite": "it has no backend for TFLite",
            "pt2": "its PyTorch backend takes no exported program",
            "aoti": "its torch_aoti platform is beta and takes neither named tensors nor batches",
        },
    ),
)
SERVERS: Mapping[str, PackageTarget] = {target.name: target for target in _TARGETS}
