"""The registered models. A name is short for a factory that anyone could name in full."""

from __future__ import annotations

from collections.abc import Mapping

REGISTRY: Mapping[str, str] = {
    "fraud": "exporters.models.fraud:FraudTransformer",
    "vit": "exporters.models.vit:VisionTransformer",
}
