"""Registry of models: short names for factories.

A package registers its own models as entry points; installing it is enough:

    [project.entry-points."modelport.models"]
    scorer = "acme_models:Scorer"
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint

from modelport.gateway import extensions
from modelport.gateway.errors import UsageError
from modelport.gateway.extensions import ExtensionError

MODELS: Mapping[str, str] = {
    "fraud": "modelport.exporters.models.fraud:FraudTransformer",
    "vit": "modelport.exporters.models.vit:VisionTransformer",
    "resnet50": "modelport.exporters.models.resnet:ResNet50",
    "unet": "modelport.exporters.models.unet:UNet",
    "causal-lm": "modelport.exporters.models.causal_lm:CausalLanguageModel",
}

GROUP = "modelport.models"


def registered() -> Mapping[str, str]:
    """Every name for ``--model`` with its ``package.module:factory``; nothing is imported.

    A name that two packages register stands for neither: ``find`` has the reason.
    """
    installed = extensions.installed(GROUP)
    found = {name: _factory(entries[0]) for name, entries in installed.items() if len(entries) == 1}
    return {**MODELS, **{name: found[name] for name in found if name not in MODELS}}


def find(name: str) -> str | None:
    """The ``package.module:factory`` that is registered as ``name``; None: there is none.

    Raises:
        UsageError: two packages register different factories under the name.
    """
    if name in MODELS:
        return MODELS[name]
    try:
        entry = extensions.find(GROUP, name)
    except ExtensionError as error:
        raise UsageError(str(error)) from error
    return None if entry is None else _factory(entry)


def _factory(entry: EntryPoint) -> str:
    return entry.value.partition("[")[0].strip()  # extras may follow
