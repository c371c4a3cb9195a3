"""The architectures of the sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sweep import modules, transformers_models

#: A tenth of the architectures, of all kinds: encoders, decoders, both, images, sound, time series
#: and modules of PyTorch; each with one format, which takes it seconds.
TENTH = {
    "esm:fill-mask": "onnx",
    "patchtst:feature-extraction": "onnx",
    "Quantiles": "onnx",
    "bart:text2text-generation": "torchscript",
    "gemma3_text:text-generation": "torchscript",
    "SelectiveScan": "torchscript",
    "whisper:audio-classification": "pt2",
    "Recommender": "pt2",
    "DictOutput": "pt2",
    "gpt2:text-generation": "savedmodel",
    "CrossNetwork": "savedmodel",
    "Volumes": "savedmodel",
    "albert:text-classification": "tflite",
    "data2vec-vision:image-classification": "tflite",
    "Ranking": "tflite",
    "SqueezeExcite": "onnx",
    "DilatedConvolutions": "savedmodel",
    "LongShortTerm": "tflite",
}

#: Maps an artifact's inputs, by name, to the outputs of the original, by name or in order.
Original = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model of the sweep, with random weights.

    Attributes:
        name: unique in the catalogue.
        group: the library or family it is counted under.
        write: writes its checkpoint into an empty folder; returns the arguments of
            ``modelport export``, without format and repository.
        original: loads the model from that folder without modelport.
    """

    name: str
    group: str
    write: Callable[[Path], list[str]]
    original: Callable[[Path], Original]


def catalogue() -> dict[str, Architecture]:
    """Every architecture by its name, in the order of the page."""
    rows = [
        *(
            Architecture(row.name, row.group, row.write, row.original)
            for row in transformers_models.MODELS
        ),
        *(Architecture(row.name, "modules", row.write, row.original) for row in modules.MODELS),
    ]
    found = {row.name: row for row in rows}
    if len(found) < len(rows):
        raise ValueError("two architectures of the sweep have one name")
    return found
