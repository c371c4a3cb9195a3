"""scikit-learn models and pipelines, from ``skops`` files."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import skops.io

from modelport.exporters.loaded_model import Framework
from modelport.exporters.sources.trees.columns import columns_of, table
from modelport.exporters.sources.trees.fitted_model import FittedModel, distinct
from modelport.gateway.errors import IntegrityError, Unsupported, first_line
from modelport.gateway.repository.artifact_checks import zip_guard
from modelport.gateway.repository.artifact_checks.load_guard import no_code
from modelport.gateway.types import Array

#: Types that skops does not trust by itself. The arrays of a tree are checked here.
TREE = "sklearn.tree._tree.Tree"
HISTOGRAM_TREE = "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"
TRUSTED = (
    *(f"numpy.{name}" for name in ("dtype", "max", "mean", "median", "min", "sum")),
    TREE,
    HISTOGRAM_TREE,
    "sklearn.calibration._CalibratedClassifier",
    "sklearn.calibration._SigmoidCalibration",
    "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
    "sklearn.neural_network._stochastic_optimizers.SGDOptimizer",
    "sklearn.utils._bunch.Bunch",
)
OWN = "sklearn."
#: Modules whose functions only compute, and parts of scikit-learn whose classes are no models.
PLAIN_FUNCTIONS = ("sklearn.cluster._kmeans", "sklearn.feature_selection._univariate_selection")
NOT_MODELS = frozenset({"datasets", "externals", "tests", "utils"})
LEAF = -1


def read(path: Path) -> FittedModel:
    """Read an estimator.

    Raises:
        IntegrityError: the file is damaged, or holds types that skops does not trust.
        Unsupported: it predicts neither probabilities nor numbers, or takes named columns.
    """
    estimator = _load(path)
    columns = columns_of(estimator)
    count = len(columns) or getattr(estimator, "n_features_in_", None)
    if not count:
        raise Unsupported(f"'{path.name}' is not fitted; save it after fit()")
    for tree in trees_of(estimator):
        _check(tree, path)
    for tree, features in _histogram_trees(estimator):
        _check_histogram_tree(tree, features, path)
    scores = not hasattr(estimator, "predict_proba") and hasattr(estimator, "classes_")
    classifies = scores or hasattr(estimator, "predict_proba")
    wanted = "decision_function" if scores else "predict_proba" if classifies else "predict"
    function = getattr(estimator, wanted, None)
    if function is None and scores:
        raise Unsupported(
            f"'{path.name}' returns no probabilities; wrap it in CalibratedClassifierCV"
        )
    if function is None:
        raise Unsupported(f"'{path.name}' predicts nothing; save the whole pipeline")

    def predict(features: Array) -> Array:
        with warnings.catch_warnings(action="ignore"):  # "X does not have valid feature names"
            found = function(features)
        if isinstance(found, list):
            raise Unsupported(
                f"'{path.name}' gives probabilities of {len(found)} outputs; export an estimator "
                "for each"
            )
        return np.asarray(found).reshape(len(features), -1)

    try:
        rng = np.random.default_rng(0)
        drawn = {column.name: column.draw(1, rng) for column in columns}
        rows = table(columns, drawn) if columns else np.zeros((1, count), np.float32)
        outputs = predict(rows).shape[1]
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(
            f"'{path.name}' does not predict from a matrix of numbers ({first_line(error)}); train "
            "it on one, without named columns"
        ) from error
    # Mixtures have components, not classes.
    names = getattr(estimator, "classes_", range(outputs))
    classes = [str(name) for name in names] if classifies else []
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
        missing=direct and any(_histogram_trees(estimator)),
        columns=columns,
        scores=scores,
        minimum=None if columns or _takes(predict, -np.ones_like(rows)) else 0.0,
    )


def _takes(predict: Callable[[Array], Array], rows: Array) -> bool:
    try:
        predict(rows)
    except ValueError:  # "Negative values in data"
        return False
    return True


def _load(path: Path) -> Any:
    zip_guard.check(path)
    try:
        asked = set(skops.io.get_untrusted_types(file=path))
        trusted = {name for name in asked if name in TRUSTED or _is_plain_class(name)}
        foreign = sorted(asked - trusted)
        if foreign and all(name.startswith(OWN) for name in foreign):
            raise Unsupported(
                f"'{path.name}' holds {', '.join(foreign)}, whose content nothing checks: not "
                f"loaded; {_remedy(foreign)}"
            )
        if foreign:
            raise IntegrityError(
                f"'{path.name}' holds {', '.join(foreign)}, which may run code: refused and not "
                "loaded; save a model of scikit-learn's own types"
            )
        with no_code(path.name), warnings.catch_warnings(action="ignore"):
            return skops.io.load(path, trusted=sorted(trusted))
    except (IntegrityError, Unsupported):
        raise
    except Exception as error:
        raise IntegrityError(
            f"'{path.name}' is damaged or not a file of skops ({first_line(error)}); save it again "
            "with skops.io.dump()"
        ) from error


def _remedy(foreign: Sequence[str]) -> str:
    """Neighbours need no tree to be found."""
    if any(name.startswith("sklearn.neighbors.") for name in foreign):
        return "train it with algorithm='brute'"
    return "use another kind of estimator"


def _is_plain_class(name: str) -> bool:
    """Whether ``name`` is a class or function of scikit-learn's written in Python.

    skops trusts scikit-learn's estimators; their parts, such as kernels, are objects of the same
    kind. Compiled classes take arrays that nothing checks.
    """
    module, _, attribute = name.rpartition(".")
    parts = module.split(".")
    if parts[0] != "sklearn" or not NOT_MODELS.isdisjoint(parts):
        return False
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return False
    if isinstance(found, types.FunctionType):
        return module in PLAIN_FUNCTIONS and found.__module__ == module
    bases = found.__mro__[:-1] if isinstance(found, type) else ()
    files = [getattr(sys.modules.get(base.__module__), "__file__", None) for base in bases]
    return bool(files) and all(str(file).endswith(".py") for file in files)


def _values(estimator: Any) -> Iterator[Any]:
    """The fitted arrays and trees in an estimator and in all that it holds, each once."""
    found: list[Any] = [estimator]
    seen: set[int] = set()
    while found:
        value = found.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, np.ndarray) and value.dtype == object:
            found.extend(value.flat)
        elif isinstance(value, np.ndarray) or _kind(value) == TREE:
            yield value
        elif isinstance(value, list | tuple):
            found.extend(value)
        elif isinstance(value, Mapping):
            found.extend(value.values())
        elif _kind(value).startswith(OWN) and hasattr(value, "__dict__"):
            yield value
            found.extend(vars(value).values())


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__name__}"


def trees_of(estimator: Any) -> Iterator[Any]:
    """All trees of ``estimator``, but for those of histogram-based boosting."""
    return (value for value in _values(estimator) if _kind(value) == TREE)


def _histogram_trees(estimator: Any) -> Iterator[tuple[Any, int]]:
    """The trees of histogram-based boosting, each with the number of its features."""
    for value in _values(estimator):
        for row in getattr(value, "_predictors", ()):
            for tree in row:
                yield tree, value.n_features_in_


def _check(tree: Any, path: Path) -> None:
    """Refuse a tree whose walk would leave its arrays, which compiled code does not check."""
    count = tree.node_count
    left, right, feature = tree.children_left, tree.children_right, tree.feature
    inner = left != LEAF
    numbers = np.arange(count)[inner]
    sound = all(
        (child[inner] > numbers).all() and (child[inner] < count).all() for child in (left, right)
    )
    sound = sound and count > 0 and (right[~inner] == LEAF).all()
    if not (sound and ((feature[inner] >= 0) & (feature[inner] < tree.n_features)).all()):
        raise _unsound(path)


def _check_histogram_tree(tree: Any, features: int, path: Path) -> None:
    nodes = tree.nodes
    if nodes["is_categorical"].any():
        raise Unsupported(
            f"'{path.name}' splits on categories, which have no exact conversion; encode them as "
            "numbers before training"
        )
    inner = nodes["is_leaf"] == 0
    numbers, feature = np.arange(len(nodes))[inner], nodes["feature_idx"][inner]
    children = (nodes["left"][inner], nodes["right"][inner])
    sound = all((child > numbers).all() and (child < len(nodes)).all() for child in children)
    if not (len(nodes) and sound and ((feature >= 0) & (feature < features)).all()):
        raise _unsound(path)


def _unsound(path: Path) -> IntegrityError:
    return IntegrityError(
        f"'{path.name}' holds a tree whose nodes point outside it: refused; save it again with "
        "skops.io.dump()"
    )


def _splits(estimator: Any) -> dict[int, list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for tree in trees_of(estimator):
        inner = tree.children_left != LEAF
        for feature, value in zip(tree.feature[inner], tree.threshold[inner], strict=True):
            found[int(feature)].append(float(value))
    for tree, _ in _histogram_trees(estimator):
        nodes = tree.nodes[tree.nodes["is_leaf"] == 0]
        for feature, value in zip(nodes["feature_idx"], nodes["num_threshold"], strict=True):
            found[int(feature)].append(float(value))
    return found


def _size(value: Any) -> int:
    if _kind(value) == TREE:
        return int(value.node_count)
    return int(value.size) if isinstance(value, np.ndarray) else 0


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
