"""CatBoost models, from its JSON files; the library itself is not needed.

The layout is that of ``catboost/libs/model/model_export/json_model_helpers.cpp``: symmetric trees
in ``oblivious_trees``, all others in ``trees``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from modelport.exporters.loaded_model import Framework
from modelport.exporters.sources.trees.fitted_model import (
    PREDICTION,
    PROBABILITIES,
    FittedModel,
    distinct,
)
from modelport.gateway.errors import IntegrityError, InvalidArgument, Unsupported
from modelport.gateway.runtime import checked_json
from modelport.gateway.types import Array

#: Loss → how the library's own ``predict`` or ``predict_proba`` turns the sum of the leaves into
#: the answer; of every other loss they are the same.
BINARY, SOFTMAX, SIGMOID, EXP, UNCERTAINTY, RAW = (
    "binary",
    "softmax",
    "sigmoid",
    "exp",
    "std",
    "raw",
)
ANSWERS: Mapping[str, str] = {
    **dict.fromkeys(("Logloss", "CrossEntropy", "Focal"), BINARY),
    "MultiClass": SOFTMAX,
    "MultiClassOneVsAll": SIGMOID,
    **dict.fromkeys(("Poisson", "Tweedie"), EXP),
    "RMSEWithUncertainty": UNCERTAINTY,
}
CLASSIFIERS = (BINARY, SOFTMAX, SIGMOID)
#: Losses of rows with several labels at once.
SEVERAL_LABELS = ("MultiLogloss", "MultiCrossEntropy")
#: A key that each file has, and none of XGBoost.
MARK = b'"features_info"'
FLOAT = "FloatFeature"
#: More levels than any symmetric tree of CatBoost has.
MOST_LEVELS = 32


@dataclass(frozen=True, slots=True)
class Split:
    """A row takes the second branch if its feature is above the border."""

    split_type: str
    float_feature_index: int = 0
    border: float = 0.0


@dataclass(frozen=True, slots=True)
class SymmetricTree:
    """One split for each level; the first is the lowest bit of a leaf's number."""

    __pydantic_config__: ClassVar = {"allow_inf_nan": False}

    leaf_values: list[float]
    splits: list[Split] | None = None


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A split with two nodes below it, or a leaf with a value for each output."""

    __pydantic_config__: ClassVar = {"allow_inf_nan": False}

    left: TreeNode | None = None
    right: TreeNode | None = None
    split: Split | None = None
    value: float | list[float] | None = None


@dataclass(frozen=True, slots=True)
class FloatFeature:
    """A column of numbers."""

    feature_index: int
    flat_feature_index: int
    nan_value_treatment: Literal["AsIs", "AsFalse", "AsTrue"] = "AsIs"


@dataclass(frozen=True, slots=True)
class Features:
    """The columns by kind."""

    float_features: list[FloatFeature]
    categorical_features: list[Any] | None = None
    text_features: list[Any] | None = None
    embedding_features: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of the training, by CatBoost's name."""

    type: str


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of the training."""

    loss_function: Loss


@dataclass(frozen=True, slots=True)
class ClassNames:
    """The classes, in the order of the outputs."""

    class_names: list[bool | int | float | str] | None = None


@dataclass(frozen=True, slots=True)
class Information:
    """The facts about the training."""

    params: Parameters
    class_params: ClassNames | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """The fields of the file that its predictions depend on."""

    __pydantic_config__: ClassVar = {"allow_inf_nan": False}

    features_info: Features
    model_info: Information
    scale_and_bias: tuple[float, float | list[float]]
    oblivious_trees: list[SymmetricTree] | None = None
    trees: list[TreeNode] | None = None


@dataclass(frozen=True, slots=True)
class Ensemble:
    """The nodes of all trees, one after the other.

    Attributes:
        features, borders: a row goes from a node to ``above`` if its feature is above the border,
            and else to ``below``; a leaf is followed by itself.
        missing_above: whether it goes there with NaN.
        values: those of a leaf, ``[nodes, outputs]``; 0 of other nodes.
        roots: the first node of each tree.
        bias: added to the sum of the leaves, ``[outputs]``.
        answer: one of ``ANSWERS``, or RAW.
    """

    features: Array
    borders: Array
    missing_above: Array
    below: Array
    above: Array
    values: Array
    roots: Array
    bias: Array
    answer: str

    @property
    def is_leaf(self) -> Array:
        leaves: Array = self.below == np.arange(len(self.below))
        return leaves

    def predict(self, features: Array) -> Array:
        """The probabilities or predictions of a matrix, in float64 as CatBoost computes them."""
        rows = np.arange(len(features))[:, None]
        nodes, ended = np.broadcast_to(self.roots, (len(features), len(self.roots))), self.is_leaf
        while not ended[nodes].all():
            value = features[rows, self.features[nodes]]
            over = np.where(np.isnan(value), self.missing_above[nodes], value > self.borders[nodes])
            nodes = np.where(over, self.above[nodes], self.below[nodes])
        raw: Array = self.values[nodes].sum(axis=1) + self.bias
        if self.answer == SOFTMAX:
            raw = np.exp(raw - raw.max(axis=1, keepdims=True))
            raw /= raw.sum(axis=1, keepdims=True)
        if self.answer in (BINARY, SIGMOID):
            raw = 1 / (1 + np.exp(-raw))
            return np.hstack([1 - raw, raw]) if self.answer == BINARY else raw
        if self.answer == UNCERTAINTY:
            raw[:, 1] = np.exp(2 * raw[:, 1])
        return np.exp(raw) if self.answer == EXP else raw


def is_catboost(path: Path) -> bool:
    """Whether a JSON file is CatBoost's."""
    return MARK in path.read_bytes()


def read(path: Path) -> FittedModel:
    """Read a model.

    Raises:
        IntegrityError: the file is damaged.
        Unsupported: it has features other than numbers, or several labels.
    """
    try:
        document = checked_json.read(Document, path.read_bytes())
        _refuse(document, path.name)
        ensemble = _ensemble(document)
    except (InvalidArgument, ValueError) as error:
        raise IntegrityError(
            f"'{path.name}' is damaged or not a CatBoost model ({error}); save it again with "
            "save_model('model.json', format='json')"
        ) from error
    splits: dict[int, list[float]] = defaultdict(list)
    inner = ~ensemble.is_leaf
    for feature, border in zip(ensemble.features[inner], ensemble.borders[inner], strict=True):
        splits[int(feature)].append(float(border))
    answer, params = ensemble.answer, document.model_info.class_params
    names = None if params is None else params.class_names
    return FittedModel(
        framework=Framework.CATBOOST,
        model=ensemble,
        predict=ensemble.predict,
        features=len(document.features_info.float_features),
        output=PROBABILITIES if answer in CLASSIFIERS else PREDICTION,
        outputs=2 if answer == BINARY else len(ensemble.bias),
        classes=_names(names) if answer in CLASSIFIERS else (),
        splits=distinct(splits),
        size=ensemble.values.size + int(inner.sum()),
        missing=True,
    )


def _names(classes: Sequence[bool | int | float | str] | None) -> list[str] | None:
    return [str(each) for each in classes] if classes else None


def _refuse(document: Document, name: str) -> None:
    """Refuse what cannot be exported, in the model's own words."""
    for kind in ("categorical", "text", "embedding"):
        if getattr(document.features_info, f"{kind}_features"):
            raise Unsupported(
                f"'{name}' has {kind} features, which have no conversion; encode them as numbers "
                "before training"
            )
    loss = document.model_info.params.loss_function.type
    if loss in SEVERAL_LABELS:
        raise Unsupported(
            f"'{name}' has loss '{loss}', of several labels, which has no conversion; train one "
            "model with Logloss for each label"
        )
    if loss not in ANSWERS and document.model_info.class_params is not None:
        raise Unsupported(
            f"'{name}' is a classifier with loss '{loss}', which has no conversion; train it with "
            "Logloss or MultiClass"
        )


def _ensemble(document: Document) -> Ensemble:
    """Put the nodes of all trees one after the other.

    Raises:
        ValueError: the file contradicts itself.
    """
    scale, bias = document.scale_and_bias
    added = np.atleast_1d(np.asarray(bias, np.float64))
    answer = ANSWERS.get(document.model_info.params.loss_function.type, RAW)
    if len(added) != {BINARY: 1, UNCERTAINTY: 2}.get(answer, len(added)):
        raise ValueError(f"scale_and_bias: {len(added)} outputs do not fit the loss")
    features = {f.feature_index: f for f in document.features_info.float_features}
    if {f.flat_feature_index for f in features.values()} != set(range(len(features))):
        raise ValueError("float_features: they are not numbered from 0")
    rows: list[tuple[int, float, bool, int, int]] = []
    leaves: list[Array | float] = []
    roots: list[int] = []

    def add(split: Split | None, below: int, above: int, value: Array | float = 0.0) -> None:
        feature = None if split is None else features.get(split.float_feature_index)
        if split is None:
            rows.append((0, 0.0, False, len(rows), len(rows)))
        elif feature is None or split.split_type != FLOAT:
            raise ValueError(f"a split of kind '{split.split_type}' is of no feature in the file")
        else:
            column, missing_above = (
                feature.flat_feature_index,
                feature.nan_value_treatment == "AsTrue",
            )
            rows.append((column, split.border, missing_above, roots[-1] + below, roots[-1] + above))
        leaves.append(value)

    def leaf(value: float | Sequence[float] | None) -> Array:
        found = np.atleast_1d(np.asarray(value, np.float64)) * scale
        if found.shape != added.shape:
            raise ValueError(f"a leaf has {found.size} values and not {added.size}")
        return found

    for tree in document.oblivious_trees or ():
        roots.append(len(rows))
        splits, width = tree.splits or [], len(added)
        inner = (1 << min(len(splits), MOST_LEVELS)) - 1
        if len(tree.leaf_values) != (inner + 1) * width:
            raise ValueError(f"{len(splits)} splits and {len(tree.leaf_values)} leaf_values")
        for number in range(inner):  # the first level has the highest bit, which is the last split
            level = (number + 1).bit_length()
            add(splits[-level], 2 * number + 1, 2 * number + 2)
        for at in range(0, len(tree.leaf_values), width):
            add(None, 0, 0, leaf(tree.leaf_values[at : at + width]))
    for node in document.trees or ():
        roots.append(len(rows))
        nodes = [node]
        for each in nodes:  # grows: the branches of a node come after all that came before
            if each.split is None:
                add(None, 0, 0, leaf(each.value))
            elif each.left is None or each.right is None:
                raise ValueError("a split has not two branches")
            else:
                add(each.split, len(nodes), len(nodes) + 1)
                nodes += (each.left, each.right)
    if not roots:
        raise ValueError("it has no trees")
    columns = list(zip(*rows, strict=True))
    values = np.zeros((len(rows), len(added)))
    for number, value in enumerate(leaves):
        values[number] = value
    return Ensemble(
        features=np.array(columns[0], np.int64),
        borders=np.array(columns[1], np.float32),  # as CatBoost stores them
        missing_above=np.array(columns[2], bool),
        below=np.array(columns[3], np.int64),
        above=np.array(columns[4], np.int64),
        values=values,
        roots=np.array(roots, np.int64),
        bias=added,
        answer=answer,
    )
