"""Registry of models: short names for factories.

A package registers its own models as entry points; installing it is enough:

    [project.entry-points."modelport.models"]
    scorer = "acme_models:Scorer"
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from modelport.gateway.cli.errors import UsageError

REGISTRY: Mapping[str, str] = {
    "fraud": "modelport.exporters.models.fraud:FraudTransformer",
    "vit": "modelport.exporters.models.vit:VisionTransformer",
    "resnet50": "modelport.exporters.models.resnet:ResNet50",
    "unet": "modelport.exporters.models.unet:UNet",
    "causal-lm": "modelport.exporters.models.causal_lm:CausalLanguageModel",
}

ENTRY_POINTS = "modelport.models"


def registered() -> Mapping[str, str]:
    """Every name for ``--model``, with its ``package.module:factory``; nothing is imported.

    Raises:
        UsageError: two packages register different factories under one name.
    """
    known = dict(REGISTRY)
    for entry in entry_points(group=ENTRY_POINTS):
        factory = entry.value.partition("[")[0].strip()  # extras may follow
        if known.setdefault(entry.name, factory) != factory:
            raise UsageError(
                f"model '{entry.name}' is registered twice, as {known[entry.name]} and as "
                f"{factory}; rename one, or uninstall its package"
            )
    return known
