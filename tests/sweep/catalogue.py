"""The architectures of the sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sweep import modules, transformers_models

#: A part of the architectures with all kinds, each to one format: every format is there, and the
#: one that takes least time is there most often.
SAMPLE = {
    "patchtst:feature-extraction": "torchscript",
    "bart:text2text-generation": "torchscript",
    "gemma3_text:text-generation": "torchscript",
    "whisper:audio-classification": "torchscript",
    "clip:zero-shot-image-classification": "torchscript",
    "yolos:object-detection": "torchscript",
    "data2vec-vision:image-classification": "torchscript",
    "distilbert:text-classification": "torchscript",
    "Perceptron": "onnx",
    "DictOutput": "pt2",
    "LongShortTerm": "torchscript",
    "Rotary": "torchscript",
    "Volumes": "torchscript",
    "AnySizeClassifier": "torchscript",
    "SpatialTransformer": "torchscript",
    "Recommender": "torchscript",
    "Ranking": "torchscript",
    "GraphConvolution": "pt2",
    "Branches": "pt2",
    "SelectiveScan": "torchscript",
    "Spectrum": "torchscript",
    "MixtureDensity": "torchscript",
    "TiedAutoencoder": "torchscript",
    "WeightNormed": "torchscript",
    "BrainFloat": "torchscript",
    "SiameseDistance": "torchscript",
    "gpt2:text-generation": "savedmodel",
    "esm:fill-mask": "onnx",
    "albert:text-classification": "tflite",
}

#: Maps an artifact's inputs, by name, to the outputs of the original, by name or in order.
Original = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model of the sweep, with random weights.

    Attributes:
        name: unique in the catalogue.
        kind: what an exporter meets in it.
        write: writes its checkpoint into an empty folder; returns the arguments of
            ``modelport export``, without format and repository.
        original: loads the model from that folder without modelport.
    """

    name: str
    kind: str
    write: Callable[[Path], list[str]]
    original: Callable[[Path], Original]


def catalogue() -> dict[str, Architecture]:
    """Every architecture by its name, in the order of the page."""
    rows: list[transformers_models.TransformersModel | modules.WrittenModule] = []
    rows += transformers_models.MODELS
    rows += modules.MODELS
    found = {r.name: Architecture(r.name, r.kind, r.write, r.original) for r in rows}
    if len(found) < len(rows):
        raise ValueError("two architectures of the sweep have one name")
    return found
