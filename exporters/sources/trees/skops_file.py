"""An estimator from a ``skops`` file: only types that run no code, and only sound arrays.

What a prediction does not need is removed: search trees of neighbours, whose content nothing
checks, and the names of columns, which demand a data frame.
"""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import skops.io

from modelport.exporters.sources.trees import sound_arrays
from modelport.exporters.sources.trees.sound_arrays import HISTOGRAM_TREE, TREE, kind_of
from modelport.gateway.errors import IntegrityError, Unsupported, first_line
from modelport.gateway.repository.artifact_checks import zip_guard
from modelport.gateway.repository.artifact_checks.load_guard import no_code

#: Types that skops does not trust by itself.
TRUSTED = (
    *(f"numpy.{name}" for name in ("dtype", "max", "mean", "median", "min", "sum")),
    TREE,
    HISTOGRAM_TREE,
    "functools.partial",  # its function is trusted by its own name
    "sklearn.calibration._CalibratedClassifier",
    "sklearn.calibration._SigmoidCalibration",
    "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
    "sklearn.neural_network._stochastic_optimizers.SGDOptimizer",
    "sklearn.utils._bunch.Bunch",
    *(f"sklearn.utils._metadata_requests.{n}Request" for n in ("Metadata", "MethodMetadata")),
    "sklearn.utils.validation.check_array",
)
#: Trees that find neighbours, and their distances, which nobody asks.
SEARCH_TREES = ("sklearn.neighbors._kd_tree", "sklearn.neighbors._ball_tree")
DISTANCES = "sklearn.metrics._dist_metrics"
OWN = "sklearn."
#: Libraries whose types a file holds because scikit-learn does: a SplineTransformer has BSpline.
LIBRARIES = (OWN, "scipy.")
#: Boosted trees in pipelines, which native code reads, and their types.
BOOSTERS = ("xgboost.", "lightgbm.")
NATIVE_READERS = {
    "xgboost.core": ("XGBoosterCreate", "XGBoosterUnserializeFromBuffer", "XGBoosterFree"),
    "lightgbm.basic": ("LGBM_BoosterLoadModelFromString", "LGBM_BoosterFree"),
}
BOOSTER_TYPES = frozenset(
    (
        *(f"xgboost.{name}" for name in ("core.Booster", "sklearn.XGBModel")),
        *(f"xgboost.sklearn.XGB{name}" for name in ("Classifier", "Regressor")),
        *(f"xgboost.sklearn.XGBRF{name}" for name in ("Classifier", "Regressor")),
        *(f"lightgbm.{name}" for name in ("basic.Booster", "sklearn.LGBMModel")),
        *(f"lightgbm.sklearn.LGBM{name}" for name in ("Classifier", "Regressor")),
        "collections.OrderedDict",
    )
)
#: Modules whose functions only compute, and parts of scikit-learn whose classes are no models.
PLAIN_FUNCTIONS = (
    "sklearn.cluster._kmeans",
    "sklearn.feature_selection._mutual_info",
    "sklearn.feature_selection._univariate_selection",
    "sklearn.metrics._classification",
    "sklearn.metrics._regression",
)
NOT_MODELS = frozenset({"datasets", "externals", "tests", "utils"})


def read(path: Path) -> Any:
    """Read a fitted estimator.

    Raises:
        IntegrityError: the file is damaged, or holds types that may run code.
        Unsupported: it holds types of scikit-learn whose content nothing checks.
    """
    estimator = _load(path)
    _simplify(estimator)
    for value in values_of(estimator):
        sound_arrays.check(value, path)
    return estimator


def _simplify(estimator: Any) -> None:
    """Find neighbours without trees; address columns by position, and return arrays."""
    for value in values_of(estimator):
        if getattr(value, "_tree", None) is not None and hasattr(value, "_fit_method"):
            value._tree, value._fit_method = None, "brute"
        if type(value).__name__ == "FunctionTransformer":
            value.validate = True  # which makes numbers of objects
        if hasattr(value, "_sklearn_output_config"):
            del value._sklearn_output_config
        positions = getattr(value, "_transformer_to_input_indices", None)
        if positions is not None:
            value.transformers_ = [
                (
                    name,
                    part,
                    positions[name][0] if isinstance(chosen, str | int) else positions[name],
                )
                for name, part, chosen in value.transformers_
            ]


def holds_booster(path: Path) -> bool:
    """Whether native code of XGBoost or LightGBM reads a part of the file."""
    return any(name.startswith(BOOSTERS) for name in _types(path))


def _types(path: Path) -> set[str]:
    """The types in the file that skops does not trust by itself."""
    zip_guard.check(path)
    try:
        return set(skops.io.get_untrusted_types(file=path))
    except Exception as error:
        raise _damaged(path, error) from error


def _load(path: Path) -> Any:
    asked = _types(path)
    trusted = {n for n in asked if n in TRUSTED or n in BOOSTER_TYPES or _is_plain(n)}
    foreign = sorted(asked - trusted)
    if foreign and all(name.startswith(LIBRARIES) for name in foreign):
        raise Unsupported(
            f"'{path.name}' holds {', '.join(foreign)}, whose content nothing checks: not loaded; "
            "use another kind of estimator"
        )
    if foreign:
        raise IntegrityError(
            f"'{path.name}' holds {', '.join(foreign)}, which may run code: refused and not "
            "loaded; save a model of scikit-learn's own types"
        )
    if any(name.startswith(BOOSTERS) for name in trusted):
        _find_native_functions()
    try:
        with no_code(path.name), warnings.catch_warnings(action="ignore"):
            return skops.io.load(path, trusted=sorted(trusted))
    except IntegrityError:
        raise
    except Exception as error:
        raise _damaged(path, error) from error


def _find_native_functions() -> None:
    """Look up the functions that read boosters, which ``no_code`` would refuse."""
    for module, names in NATIVE_READERS.items():
        library = importlib.import_module(module)._LIB
        for name in names:
            getattr(library, name)


def _damaged(path: Path, error: Exception) -> IntegrityError:
    return IntegrityError(
        f"'{path.name}' is damaged or not a file of skops ({first_line(error)}); save it again "
        "with skops.io.dump()"
    )


def _is_plain(name: str) -> bool:
    """Whether ``name`` is a number type of NumPy, or a class or function written in Python.

    skops trusts scikit-learn's estimators; their parts, such as kernels, are objects of the same
    kind. Compiled classes take arrays that nothing checks, but ``_simplify`` removes search trees.
    """
    module, _, attribute = name.rpartition(".")
    if module == "numpy":
        found = getattr(np, attribute, None)
        return isinstance(found, type) and issubclass(found, np.generic)
    if module in (*SEARCH_TREES, DISTANCES):
        kind = getattr(importlib.import_module(module), attribute, None)
        return isinstance(kind, type) and kind.__module__ == module
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


def values_of(estimator: Any) -> Iterator[Any]:
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
        elif isinstance(value, np.ndarray) or kind_of(value) == TREE:
            yield value
        elif isinstance(value, list | tuple):
            found.extend(value)
        elif isinstance(value, Mapping):
            found.extend(value.values())
        elif kind_of(value).startswith((OWN, *BOOSTERS)) and hasattr(value, "__dict__"):
            yield value
            found.extend(vars(value).values())


def trees_of(estimator: Any) -> Iterator[Any]:
    """All trees of ``estimator``, but for those of histogram-based boosting."""
    return (value for value in values_of(estimator) if kind_of(value) == TREE)


def histogram_trees(estimator: Any) -> Iterator[tuple[Any, int]]:
    """The trees of histogram-based boosting, each with the number of its features."""
    for value in values_of(estimator):
        for row in getattr(value, "_predictors", ()):
            for tree in row:
                yield tree, value.n_features_in_
