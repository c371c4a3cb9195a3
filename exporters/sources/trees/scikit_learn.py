"""scikit-learn models and pipelines, from ``skops`` files."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import skops.io

from modelport.exporters.loaded_model import Framework
from modelport.exporters.sources.trees.fitted_model import FittedModel, distinct
from modelport.gateway.cli.errors import first_line
from modelport.gateway.errors import IntegrityError, Unsupported
from modelport.gateway.repository.artifact_checks import zip_guard
from modelport.gateway.repository.artifact_checks.load_guard import no_code
from modelport.gateway.types import Array

#: Types that skops does not trust by itself. The arrays of a tree are checked here.
TRUSTED = ("sklearn.tree._tree.Tree",)
TREE = "sklearn.tree._tree.Tree"
LEAF = -1


def read(path: Path) -> FittedModel:
    """Read an estimator.

    Raises:
        IntegrityError: the file is damaged, or holds types that skops does not trust.
        Unsupported: it predicts neither probabilities nor numbers, or takes named columns.
    """
    estimator = _load(path)
    count = getattr(estimator, "n_features_in_", None)
    if count is None:
        raise Unsupported(f"'{path.name}' is not fitted; save it after fit()")
    for tree in _trees(estimator):
        _check(tree, path)
    classifies = hasattr(estimator, "predict_proba")
    if not classifies and not hasattr(estimator, "predict"):
        raise Unsupported(f"'{path.name}' predicts nothing; save the whole pipeline")
    if not classifies and hasattr(estimator, "classes_"):
        raise Unsupported(
            f"'{path.name}' returns no probabilities; wrap it in CalibratedClassifierCV"
        )
    function = estimator.predict_proba if classifies else estimator.predict

    def predict(features: Array) -> Array:
        with warnings.catch_warnings(action="ignore"):  # "X does not have valid feature names"
            return np.asarray(function(features)).reshape(len(features), -1)

    try:
        outputs = predict(np.zeros((1, count), np.float32)).shape[1]
    except Exception as error:
        raise Unsupported(
            f"'{path.name}' does not predict from a matrix of numbers ({first_line(error)}); train "
            "it on one, without named columns"
        ) from error
    classes = [str(name) for name in estimator.classes_] if classifies else []
    first = estimator[0] if hasattr(estimator, "steps") else estimator
    direct = not hasattr(estimator, "steps") or len(estimator.steps) == 1
    return FittedModel(
        framework=Framework.SCIKIT_LEARN,
        model=estimator,
        predict=predict,
        features=int(count),
        outputs=outputs,
        classes=classes,
        splits=distinct(_splits(estimator)) if direct else {},
        size=sum(_size(value) for value in _values(estimator)),
        centre=_centre(first),
        spread=_spread(first),
    )


def _load(path: Path) -> Any:
    zip_guard.check(path)
    try:
        foreign = sorted(set(skops.io.get_untrusted_types(file=path)) - set(TRUSTED))
        if foreign:
            raise IntegrityError(
                f"'{path.name}' holds {', '.join(foreign)}, which may run code: refused and not "
                "loaded; save a model of scikit-learn's own types"
            )
        with no_code(path.name), warnings.catch_warnings(action="ignore"):
            return skops.io.load(path, trusted=list(TRUSTED))
    except IntegrityError:
        raise
    except Exception as error:
        raise IntegrityError(
            f"'{path.name}' is damaged or not a file of skops ({first_line(error)}); save it again "
            "with skops.io.dump()"
        ) from error


def _values(estimator: Any, depth: int = 0) -> Iterator[Any]:
    """The fitted arrays and trees in an estimator and those inside of it."""
    if depth > 8:
        return
    if isinstance(estimator, np.ndarray) and estimator.dtype == object:
        estimator = list(estimator.flat)
    if isinstance(estimator, np.ndarray) or _is_tree(estimator):
        yield estimator
    elif isinstance(estimator, list | tuple):
        for each in estimator:
            yield from _values(each, depth + 1)
    elif hasattr(estimator, "get_params"):
        for value in vars(estimator).values():
            yield from _values(value, depth + 1)


def _is_tree(value: Any) -> bool:
    return f"{type(value).__module__}.{type(value).__name__}" == TREE


def _trees(estimator: Any) -> Iterator[Any]:
    return (value for value in _values(estimator) if _is_tree(value))


def _check(tree: Any, path: Path) -> None:
    """Refuse a tree whose walk would leave its arrays, which compiled code does not check."""
    count = tree.node_count
    left, right, feature = tree.children_left, tree.children_right, tree.feature
    inner = left != LEAF
    numbers = np.arange(count)[inner]
    sound = all(
        (child[inner] > numbers).all() and (child[inner] < count).all() for child in (left, right)
    )
    sound = sound and (right[~inner] == LEAF).all()
    if not (sound and ((feature[inner] >= 0) & (feature[inner] < tree.n_features)).all()):
        raise IntegrityError(
            f"'{path.name}' holds a tree whose nodes point outside it: refused; save it again with "
            "skops.io.dump()"
        )


def _splits(estimator: Any) -> dict[int, list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for tree in _trees(estimator):
        inner = tree.children_left != LEAF
        for feature, value in zip(tree.feature[inner], tree.threshold[inner], strict=True):
            found[int(feature)].append(float(value))
    return found


def _size(value: Any) -> int:
    return int(value.node_count if _is_tree(value) else value.size)


def _centre(step: Any) -> Array | float:
    """The means of the features in training, as a first step such as StandardScaler knows them."""
    if getattr(step, "mean_", None) is not None:
        return np.asarray(step.mean_)
    if hasattr(step, "data_min_"):
        return np.asarray((step.data_min_ + step.data_max_) / 2)
    return np.asarray(getattr(step, "center_", None) if hasattr(step, "center_") else 0.0)


def _spread(step: Any) -> Array | float:
    if hasattr(step, "data_range_"):
        return np.asarray(step.data_range_) / 4
    scale = getattr(step, "scale_", None)
    return 1.0 if scale is None else np.asarray(scale)
