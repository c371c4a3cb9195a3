"""Estimators of scikit-learn in parts that skl2onnx converts, with the same answers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import TransformedTargetRegressor
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.preprocessing import FunctionTransformer

from modelport.exporters.sources.trees.skops_file import OWN
from modelport.exporters.sources.trees.sound_arrays import kind_of
from modelport.gateway.types import Array

#: Attributes of estimators that answer by another that they hold.
HOLDERS = {
    **dict.fromkeys(("GridSearchCV", "RandomizedSearchCV"), "best_estimator_"),
    **dict.fromkeys(("HalvingGridSearchCV", "HalvingRandomSearchCV"), "best_estimator_"),
    **dict.fromkeys(("FixedThresholdClassifier", "TunedThresholdClassifierCV"), "estimator_"),
    **{"SelfTrainingClassifier": "estimator_", "FrozenEstimator": "estimator"},
}
#: Losses of histogram-based boosting whose trees add up to a logarithm, which skl2onnx forgets.
LOGARITHMIC = ("poisson", "gamma")
_WORD = 32  # bits of each number in a set of categories


class CategoryMembers(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Columns, and further columns with 1 where a category belongs to a set.

    Attributes:
        order: of the columns.
        tables: for each column with categories its place in this order, the categories, and what
            belongs to each set ``[categories, sets]``; the last row is for others, such as NaN.
        width: columns of the result.
    """

    def __init__(self, order: Array, tables: list[tuple[int, Array, Array]], width: int):
        self.order, self.tables, self.width = order, tables, width


class Affine(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """``rows @ matrix + bias``."""

    def __init__(self, matrix: Array, bias: Array):
        self.matrix, self.bias = matrix, bias


def rewritten(estimator: Any, transforms: bool = False) -> Any:
    """``estimator`` as skl2onnx converts it; itself stays as it is.

    Args:
        transforms: whether ``transform`` gives the result, and not a prediction.
    """
    found = _rewritten(estimator)
    last = found.steps[-1][1] if isinstance(found, Pipeline) else found
    if transforms or type(last).__name__ not in ("RFE", "RFECV"):
        return found
    steps = found.steps[:-1] if isinstance(found, Pipeline) else []
    return Pipeline([*steps, ("rfe", last), ("estimator", last.estimator_)])


def _rewritten(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_rewritten, value))
    if not (kind_of(value).startswith(OWN) and hasattr(value, "__dict__")):
        return value
    name = type(value).__name__
    if name in HOLDERS and hasattr(value, HOLDERS[name]):
        return _rewritten(getattr(value, HOLDERS[name]))
    found = copy.copy(value)
    for key, held in vars(value).items():
        if isinstance(held, list | tuple) or kind_of(held).startswith(OWN):
            setattr(found, key, _rewritten(held))
    if name == "VotingClassifier":
        found.flatten_transform = False  # of transform(), which nobody asks
    elif name == "KBinsDiscretizer" and found.encode == "onehot":
        found.encode = "onehot-dense"
    elif isinstance(found, Pipeline):
        found.steps = [step for step in found.steps if not _imputes_text(step[1])]
    elif name == "OneHotEncoder" and hasattr(found, "categories_") and found.drop is None:
        return _without_groups(found)
    elif name == "SimpleImputer" and getattr(found, "indicator_", None) is not None:
        indicator, found.indicator_, found.add_indicator = found.indicator_, None, False
        return FeatureUnion([("imputer", found), ("indicator", indicator)])
    elif name.startswith("HistGradientBoosting") and hasattr(found, "_predictors"):
        inner = found if found.is_categorical_ is None else _without_categories(found)
        return _exponential(inner) if found.loss in LOGARITHMIC else inner
    return found


def _without_groups(encoder: Any) -> Any:
    """A one-hot encoder without groups of infrequent categories, and the sums that make them."""
    unknown = encoder.handle_unknown == "infrequent_if_exist"
    if unknown:
        encoder.handle_unknown = "ignore"
    if all(each is None for each in getattr(encoder, "_infrequent_indices", (None,))):
        return encoder
    groups = [
        np.arange(len(categories)) if group is None else np.asarray(group)
        for categories, group in zip(
            encoder.categories_, encoder._default_to_infrequent_mappings, strict=True
        )
    ]
    infrequent = encoder._infrequent_indices
    starts = np.cumsum([0, *(group.max() + 1 for group in groups)])
    columns = np.concatenate([s + g for s, g in zip(starts, groups, strict=False)])
    matrix = np.zeros((len(columns), starts[-1]), np.float32)
    matrix[np.arange(len(columns)), columns] = 1
    bias = np.zeros(starts[-1], np.float32)
    for last, rare in zip(starts[1:] - 1, infrequent, strict=True):
        if unknown and rare is not None:  # 1, unless the category is a frequent one
            own = (columns >= starts[np.searchsorted(starts, last, "right") - 1]) & (columns < last)
            matrix[own, last], matrix[columns == last, last], bias[last] = -1, 0, 1
    encoder.min_frequency = encoder.max_categories = None
    encoder._infrequent_enabled = False
    return Pipeline([("encoder", encoder), ("groups", Affine(matrix, bias))])


def _imputes_text(step: Any) -> bool:
    """Whether ``step`` fills missing texts; a tensor of strings has no missing ones."""
    filled = getattr(step, "statistics_", None)  # a column transformer keeps unfitted parts, too
    return isinstance(filled, np.ndarray) and filled.dtype == object


def _exponential(model: Any) -> TransformedTargetRegressor:
    """A regressor whose answer is e to the power of the model's."""
    found = TransformedTargetRegressor()
    found.regressor_, found._training_dim = model, 1
    found.transformer_ = FunctionTransformer(inverse_func=np.exp)
    return found


def _without_categories(model: Any) -> Pipeline:
    """Histogram-based boosting whose splits on categories are splits on membership columns."""
    model._predictors = copy.deepcopy(model._predictors)
    trees = [tree for row in model._predictors for tree in row]
    known, numbers = model._bin_mapper.make_known_categories_bitsets()
    right: dict[int, list[Array]] = {}  # column -> for each split, what goes to the right
    for tree in trees:
        for node in tree.nodes[tree.nodes["is_categorical"] == 1]:
            feature = int(node["feature_idx"])
            left = _bits(tree.raw_left_cat_bitsets[node["bitset_idx"]])
            missing = not node["missing_go_to_left"]
            seen = left | _bits(known[numbers[feature]])
            found = np.append(np.where(seen, ~left, missing), missing)
            right.setdefault(feature, []).append(found)
    starts, width = {}, model.n_features_in_
    for feature, sets in right.items():
        starts[feature], width = width, width + len(sets)
    for tree in trees:
        for index in np.flatnonzero(tree.nodes["is_categorical"]):
            feature = int(tree.nodes["feature_idx"][index])
            tree.nodes["feature_idx"][index] = starts[feature]
            tree.nodes["num_threshold"][index] = 0.5
            tree.nodes["is_categorical"][index] = 0
            starts[feature] += 1
    preprocessor, model._preprocessor = model._preprocessor, None
    categories = preprocessor.named_transformers_["encoder"].categories_
    tables = [
        (feature, categories[feature], np.stack(sets, axis=1)) for feature, sets in right.items()
    ]
    places = preprocessor._transformer_to_input_indices
    order = np.array([*places["encoder"], *places["numerical"]])
    model.is_categorical_, model.n_features_in_ = None, width
    return Pipeline([("members", CategoryMembers(order, tables, width)), ("model", model)])


def _bits(words: Array) -> Array:
    """The bits of a set, lowest first."""
    bits = np.asarray(words)[:, None] >> np.arange(_WORD, dtype=np.uint32) & 1
    found: Array = bits.ravel() == 1
    return found
