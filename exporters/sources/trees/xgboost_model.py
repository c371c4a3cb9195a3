"""XGBoost models, from its JSON and UBJSON files."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import xgboost

from modelport.exporters.loaded_model import Framework
from modelport.exporters.sources.trees.fitted_model import (
    PREDICTION,
    PROBABILITIES,
    FittedModel,
    distinct,
)
from modelport.gateway.errors import IntegrityError, Unsupported, first_line
from modelport.gateway.types import Array

BINARY, MULTICLASS = "binary:logistic", ("multi:softprob", "multi:softmax")


def read(path: Path) -> FittedModel:
    """Read a booster.

    Raises:
        IntegrityError: the file is damaged.
        Unsupported: it is not a boosted tree of one output, or a ranker.
    """
    booster = xgboost.Booster()
    try:
        booster.load_model(path)
        document = json.loads(booster.save_raw("json"))["learner"]
    except (ValueError, xgboost.core.XGBoostError) as error:
        raise IntegrityError(
            f"'{path.name}' is damaged or not an XGBoost model ({first_line(error)}); save it "
            "again with save_model()"
        ) from error
    objective = document["objective"]["name"]
    if document["gradient_booster"]["name"] != "gbtree":
        raise Unsupported(
            f"'{path.name}' is a '{document['gradient_booster']['name']}' booster, which has no "
            "conversion; train with booster='gbtree'"
        )
    if objective.startswith(("rank:", "survival:", "binary:hinge", "binary:logitraw")):
        raise Unsupported(f"'{path.name}' has objective '{objective}', which has no conversion")
    if objective in MULTICLASS:
        booster.set_param({"objective": MULTICLASS[0]})
    classes: tuple[str, ...] | None = None if objective in (BINARY, *MULTICLASS) else ()
    trees = document["gradient_booster"]["model"]["trees"]

    def predict(features: Array) -> Array:
        found: Array = booster.predict(xgboost.DMatrix(features), validate_features=False)
        if objective == BINARY:
            return np.stack([1 - found, found], axis=1)
        return found.reshape(len(features), -1)

    count = int(booster.num_features())
    return FittedModel(
        framework=Framework.XGBOOST,
        model=booster,
        predict=predict,
        features=count,
        output=PREDICTION if classes is not None else PROBABILITIES,
        outputs=predict(np.zeros((1, count), np.float32)).shape[1],
        classes=classes,
        splits=distinct(_splits(trees)),
        size=sum(len(tree["split_conditions"]) for tree in trees),
        missing=True,
    )


def _splits(trees: list[dict[str, Any]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for tree in trees:
        rows = zip(
            tree["left_children"], tree["split_indices"], tree["split_conditions"], strict=True
        )
        for left, feature, condition in rows:
            if left != -1:  # otherwise a leaf, and its value
                found[feature].append(condition)
    return found
