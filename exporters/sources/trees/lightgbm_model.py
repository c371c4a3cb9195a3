"""LightGBM models, from its text files."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import lightgbm
import numpy as np

from modelport.exporters.loaded_model import Framework
from modelport.exporters.sources.trees.fitted_model import (
    PREDICTION,
    PROBABILITIES,
    FittedModel,
    distinct,
)
from modelport.gateway.errors import IntegrityError, Unsupported, first_line
from modelport.gateway.types import Array

#: The first line of each file.
HEADER = b"tree"
#: LightGBM reads features and writes splits up to this size for 0.
ZERO = 1.0000000180025095e-35
CLASSIFIERS = ("binary", "multiclass")


def read(path: Path) -> FittedModel:
    """Read a booster.

    Raises:
        IntegrityError: the file is damaged.
        Unsupported: it ranks, or has categorical splits, which ONNX has not.
    """
    content = path.read_bytes()
    if content.splitlines()[:1] != [HEADER]:
        raise IntegrityError(
            f"'{path.name}' is not a LightGBM model; save it with booster_.save_model()"
        )
    try:
        booster = lightgbm.Booster(model_str=content.decode())
        text = booster.model_to_string()
    except (ValueError, lightgbm.basic.LightGBMError) as error:
        raise IntegrityError(
            f"'{path.name}' is damaged ({first_line(error)}); save it again with "
            "booster_.save_model()"
        ) from error
    fields = [line.partition("=") for line in text.splitlines()]
    objective = next((value.split()[0] for key, _, value in fields if key == "objective"), "")
    if objective in ("lambdarank", "rank_xendcg"):
        raise Unsupported(f"'{path.name}' has objective '{objective}', which has no conversion")
    if any(key == "num_cat" and value != "0" for key, _, value in fields):
        raise Unsupported(
            f"'{path.name}' splits on categories, which have no exact conversion; encode them as "
            "numbers before training"
        )
    count = int(booster.num_feature())

    def predict(features: Array) -> Array:
        found = np.asarray(booster.predict(features.astype(np.float64), num_threads=1))
        if objective == "binary":
            return np.stack([1 - found, found], axis=1)
        return found.reshape(len(features), -1)

    splits: dict[int, list[float]] = defaultdict(list)
    features: list[int] = []
    size = 0
    for key, _, value in fields:
        if key == "split_feature":
            features = [int(word) for word in value.split()]
        elif key == "threshold":
            for feature, word in zip(features, value.split(), strict=True):
                threshold = float(word)
                splits[feature].append(0.0 if abs(threshold) <= ZERO else threshold)
        elif key == "leaf_value":
            size += len(value.split())
    return FittedModel(
        framework=Framework.LIGHTGBM,
        model=booster,
        predict=predict,
        features=count,
        output=PROBABILITIES if objective in CLASSIFIERS else PREDICTION,
        outputs=predict(np.zeros((1, count), np.float32)).shape[1],
        classes=None if objective in CLASSIFIERS else (),
        splits=distinct(splits),
        size=size + sum(map(len, splits.values())),
        missing=True,
    )
