"""scikit-learn models and pipelines, from ``skops`` files."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import issparse

from modelport.exporters.loaded_model import Framework
from modelport.exporters.sources.trees import skops_file, sound_arrays
from modelport.exporters.sources.trees.columns import centre_of, columns_of, spread_of, table
from modelport.exporters.sources.trees.fitted_model import (
    PREDICTION,
    PROBABILITIES,
    SCORES,
    TRANSFORMED,
    FittedModel,
    distinct,
)
from modelport.exporters.sources.trees.skops_file import histogram_trees, trees_of, values_of
from modelport.exporters.sources.trees.sound_arrays import LEAF, TREE, kind_of
from modelport.gateway.errors import ModelportError, Unsupported, first_line
from modelport.gateway.types import Array

#: Few functions of positive numbers have an answer for this one.
NEGATIVE = -2.0
#: Methods of an estimator by the output that they give, the first that it has first.
METHODS = {
    PROBABILITIES: "predict_proba",
    SCORES: "decision_function",
    PREDICTION: "predict",
    TRANSFORMED: "transform",
}


def read(path: Path) -> FittedModel:
    """Read an estimator.

    Raises:
        IntegrityError: the file is damaged, or holds types that may run code.
        Unsupported: it neither predicts nor transforms, or fails on a row.
    """
    estimator = skops_file.read(path)
    columns = columns_of(estimator)
    count = len(columns) or getattr(estimator, "n_features_in_", None)
    if not count:
        raise Unsupported(f"'{path.name}' is not fitted; save it after fit()")
    output = _output(estimator, path)
    rng = np.random.default_rng(0)
    drawn = {column.name: column.draw(1, rng) for column in columns}
    rows = table(columns, drawn) if columns else np.zeros((1, count), np.float32)
    predict = _answers(getattr(estimator, METHODS[output]), path)
    if not columns and not _takes(predict, rows):  # clustering insists on its training's type
        predict = _answers(getattr(estimator, METHODS[output]), path, np.float64)
    try:
        outputs = predict(rows).shape[1]
    except ModelportError:
        raise
    except Exception as error:
        raise Unsupported(
            f"'{path.name}' fails on {'a row' if columns else 'a matrix of numbers'} "
            f"({first_line(error)}); train it on numbers and texts"
        ) from error
    for place, column in enumerate(columns):
        if not (column.is_string or column.values):
            negative = rows.copy()
            negative[0, place] = NEGATIVE
            column.minimum = None if _takes(predict, negative) else 0.0
    # Mixtures have components, not classes.
    names = getattr(estimator, "classes_", range(outputs))
    first = estimator[0] if hasattr(estimator, "steps") else estimator
    centre, spread = centre_of(first), spread_of(first)
    direct = not hasattr(estimator, "steps") or len(estimator.steps) == 1
    return FittedModel(
        framework=Framework.SCIKIT_LEARN,
        model=estimator,
        predict=predict,
        features=int(count),
        output=output,
        outputs=outputs,
        classes=[str(n) for n in names] if output in (PROBABILITIES, SCORES) else (),
        splits=distinct(_splits(estimator)),
        direct=direct,
        size=sum(_size(value) for value in values_of(estimator)),
        centre=0.0 if centre is None else centre,
        spread=1.0 if spread is None else spread,
        missing=direct and any(histogram_trees(estimator)),
        columns=columns,
        minimum=None if columns or _takes(predict, np.full_like(rows, NEGATIVE)) else 0.0,
    )


def _answers(
    function: Callable[[Array], Any], path: Path, kind: Any = None
) -> Callable[[Array], Array]:
    """``function`` of rows of a kind of numbers, with a matrix of float32 as its result."""

    def predict(features: Array) -> Array:
        with (
            sound_arrays.sparse_indices(path),
            warnings.catch_warnings(action="ignore"),  # "X does not have valid feature names"
        ):
            found = function(features if kind is None else features.astype(kind))
        if isinstance(found, list):
            raise Unsupported(
                f"'{path.name}' gives probabilities of {len(found)} outputs; export an estimator "
                "for each"
            )
        dense = found.toarray() if issparse(found) else np.asarray(found)
        return dense.reshape(len(features), -1).astype(np.float32)

    return predict


def _output(estimator: Any, path: Path) -> str:
    """The output of ``estimator``: the most that it tells."""
    for output, method in METHODS.items():
        # Outlier detectors and mixtures have scores, too, but decide by predict().
        if output == SCORES and not hasattr(estimator, "classes_"):
            continue
        if not hasattr(estimator, method):
            continue
        if (
            output == PREDICTION
            and np.asarray(getattr(estimator, "classes_", 0)).dtype.kind in "OU"
        ):
            raise Unsupported(
                f"'{path.name}' has named classes without probabilities or scores; wrap it in "
                "CalibratedClassifierCV"
            )
        return output
    raise Unsupported(f"'{path.name}' neither predicts nor transforms; save the whole pipeline")


def _takes(predict: Callable[[Array], Array], rows: Array) -> bool:
    try:
        predict(rows)
    except ValueError:  # "Negative values in data"
        return False
    return True


def _splits(estimator: Any) -> dict[int, list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for tree in trees_of(estimator):
        inner = tree.children_left != LEAF
        for feature, value in zip(tree.feature[inner], tree.threshold[inner], strict=True):
            found[int(feature)].append(float(value))
    for tree, _ in histogram_trees(estimator):
        nodes = tree.nodes[tree.nodes["is_leaf"] == 0]
        for feature, value in zip(nodes["feature_idx"], nodes["num_threshold"], strict=True):
            found[int(feature)].append(float(value))
    return found


def _size(value: Any) -> int:
    if kind_of(value) == TREE:
        return int(value.node_count)
    return int(value.size) if isinstance(value, np.ndarray) else 0
