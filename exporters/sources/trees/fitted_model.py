"""A model of scikit-learn, XGBoost, LightGBM or CatBoost with the facts that its export needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelport.exporters.loaded_model import Framework
from modelport.exporters.sources.trees.columns import Column
from modelport.gateway.types import Array, Datatype, TensorSpec

FEATURES, PROBABILITIES, PREDICTION = "features", "probabilities", "prediction"
SCORES, TRANSFORMED = "scores", "transformed"


@dataclass(frozen=True, slots=True)
class FittedModel:
    """A model of one of the libraries, with the facts that its export needs.

    Attributes:
        predict: maps a matrix to probabilities or predictions, two-dimensional; of a model with
            columns, the rows of its table.
        output, outputs: the name of the result, and its columns.
        classes: names of the classes; empty for a regressor, None for names that are not known.
        splits: the thresholds of each feature, as the library compares with them.
        direct: whether trees read the features themselves, and not results of earlier steps.
        centre, spread: of the features in training, as far as they are known.
        missing: whether a feature may be NaN.
        size: the number of trained values.
        minimum: 0 of a model that refuses negative features, such as counts.
        columns: the inputs of a model that takes strings or named columns; others take a matrix.
    """

    framework: Framework
    model: Any
    predict: Callable[[Array], Array]
    features: int
    output: str
    outputs: int
    classes: Sequence[str] | None
    splits: Mapping[int, Array]
    size: int
    direct: bool = True
    centre: Array | float = 0.0
    spread: Array | float = 1.0
    missing: bool = False
    columns: Sequence[Column] = ()
    minimum: float | None = None

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """A matrix, or every column."""
        matrix = TensorSpec(FEATURES, Datatype.FP32, (self.features,), self.minimum)
        return tuple(column.spec for column in self.columns) or (matrix,)


def distinct(splits: Mapping[int, Sequence[float]]) -> dict[int, Array]:
    """The thresholds of each feature without repetitions."""
    return {feature: np.unique(np.asarray(values)) for feature, values in splits.items() if values}
