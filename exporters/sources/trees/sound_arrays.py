"""Checks of fitted arrays that compiled code of scikit-learn and SciPy follows without looking.

An index from a file that lies outside its array would read or write memory of something else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from modelport.gateway.errors import IntegrityError, ModelportError, Unsupported

TREE = "sklearn.tree._tree.Tree"
HISTOGRAM_TREE = "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"
LEAF = -1
#: Numbers that hold a set of 256 categories.
WORDS = 8
_MATRICES: tuple[type[Any], ...] = (
    sparse.csr_matrix,
    sparse.csc_matrix,
    sparse.csr_array,
    sparse.csc_array,
)


def kind_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__name__}"


def check(value: Any, path: Path) -> None:
    """Check the arrays of an estimator, or of a part of one, but not of what it holds.

    Raises:
        IntegrityError: compiled code would leave them.
        Unsupported: they depend on an estimator that no format has.
    """
    from sklearn.ensemble import IsolationForest
    from sklearn.ensemble._forest import BaseForest
    from sklearn.ensemble._gb import BaseGradientBoosting
    from sklearn.ensemble._hist_gradient_boosting.gradient_boosting import (
        BaseHistGradientBoosting,
    )
    from sklearn.svm._base import BaseLibSVM

    try:
        if kind_of(value) == TREE and not _is_tree(value):
            raise _unsound(path, "a tree whose nodes point outside it")
        if isinstance(value, BaseHistGradientBoosting) and hasattr(value, "_predictors"):
            trees = [tree for row in value._predictors for tree in row]
            if not all(_is_histogram_tree(tree, value.n_features_in_) for tree in trees):
                raise _unsound(path, "a tree whose nodes point outside it")
            sound = value._preprocessor is None or _keeps_width(value)
        elif isinstance(value, BaseForest | BaseGradientBoosting | IsolationForest):
            sound = not hasattr(value, "estimators_") or _is_forest(value)
        elif hasattr(value, "tree_"):
            sound = value.tree_.n_features == value.n_features_in_
        elif isinstance(value, BaseLibSVM):
            sound = not hasattr(value, "support_") or _is_vector_machine(value)
        elif hasattr(value, "_fit_X") and hasattr(value, "_y"):
            sound = _are_neighbours(value)
        elif getattr(value, "cluster_centers_", None) is not None:
            sound = value.cluster_centers_.shape[1:] == (value.n_features_in_,)
        else:
            sound = True
    except ModelportError:
        raise
    except Exception:  # an attribute is absent, or of another type
        sound = False
    if not sound:
        raise _unsound(path, f"a {type(value).__name__} whose arrays do not fit each other")


@contextlib.contextmanager
def sparse_indices(path: Path) -> Iterator[None]:
    """Check the indices of every sparse matrix that is made, which SciPy does only if asked.

    Raises:
        IntegrityError: they lie outside the matrix, as those of a vocabulary or an encoder in the
            file would have it.
    """

    def checked(kind: type[Any]) -> Any:
        def check_format(self: Any, full_check: bool = True) -> None:
            try:
                super(kind, self).check_format(full_check=True)
            except ValueError as error:
                raise _unsound(path, f"indices outside a sparse matrix ({error})") from error

        return check_format

    for kind in _MATRICES:
        kind.check_format = checked(kind)
    try:
        yield
    finally:
        for kind in _MATRICES:
            del kind.check_format  # which leaves the inherited one


def _is_tree(tree: Any) -> bool:
    """Whether a walk stays inside the tree, and within its number of features."""
    count = tree.node_count
    left, right, feature = tree.children_left, tree.children_right, tree.feature
    inner = left != LEAF
    sound = all(_follow(child[inner], inner) for child in (left, right))
    sound = sound and count > 0 and (right[~inner] == LEAF).all()
    return bool(sound and _are_places(feature[inner], tree.n_features))


def _is_histogram_tree(tree: Any, features: int) -> bool:
    nodes = tree.nodes
    inner = nodes["is_leaf"] == 0
    sound = all(_follow(nodes[side][inner], inner) for side in ("left", "right"))
    sets = nodes["bitset_idx"][nodes["is_categorical"] == 1]
    for bits in (tree.raw_left_cat_bitsets, tree.binned_left_cat_bitsets):
        sound = sound and bits.shape[1:] == (WORDS,) and (sets < len(bits)).all()
    return bool(len(nodes) and sound and _are_places(nodes["feature_idx"][inner], features))


def _follow(children: Any, inner: Any) -> bool:
    """Whether every child of the ``inner`` nodes comes after its parent, so that a walk ends."""
    return bool((children > np.flatnonzero(inner)).all() and (children < len(inner)).all())


def _are_places(indices: Any, size: int) -> bool:
    return bool(((indices >= 0) & (indices < size)).all())


def _keeps_width(model: Any) -> bool:
    """Whether the encoder of categories of histogram-based boosting gives all columns on."""
    from sklearn.preprocessing import FunctionTransformer, OrdinalEncoder

    kinds = {"encoder": OrdinalEncoder, "numerical": FunctionTransformer}
    parts = {name: part for name, part, _ in model._preprocessor.transformers_}
    places = model._preprocessor._transformer_to_input_indices
    columns = sorted(place for name in kinds for place in places[name])
    return columns == list(range(model.n_features_in_)) and all(
        type(parts[name]) is kind for name, kind in kinds.items() if len(places[name])
    )


def _is_forest(model: Any) -> bool:
    """Whether all trees take the columns that compiled code gives them, without a look."""
    width = model.n_features_in_
    trees = np.ravel(np.asarray(model.estimators_, object))
    chosen = getattr(model, "estimators_features_", [range(width)] * len(trees))
    if not all(
        tree.tree_.n_features == tree.n_features_in_ == len(columns) <= width
        for tree, columns in zip(trees, chosen, strict=True)
    ):
        return False
    if not hasattr(model, "_raw_predict_init"):
        return True
    if not (isinstance(model.init_, str) or kind_of(model.init_).startswith("sklearn.dummy.")):
        raise Unsupported(
            f"a {type(model).__name__} whose init is an estimator has no conversion; "
            "train it without"
        )
    # Each column of boosted trees is added to one of the first answer.
    first = model._raw_predict_init(np.zeros((1, width), np.float32))
    return bool(first.shape[1] == model.estimators_.shape[1])


def _is_vector_machine(model: Any) -> bool:
    """Whether LIBSVM, which gets pointers, stays within the vectors and their coefficients."""
    vectors, counts = len(model.support_), np.asarray(model._n_support)
    classes = len(counts)
    pairs = classes * (classes - 1) // 2
    decides = model._impl in ("c_svc", "nu_svc")
    return bool(
        not callable(model.kernel)  # its result has any width
        and classes > 1
        and (counts >= 0).all()
        and (counts.sum() == vectors if decides else classes == 2)
        and model._dual_coef_.shape == (classes - 1, vectors)
        and model._intercept_.size == pairs
        and {model._probA.size, model._probB.size} <= {0, pairs}
        and _are_places(model.support_, model.shape_fit_[0])
        and (
            model.kernel == "precomputed"
            or model.support_vectors_.shape == (vectors, model.n_features_in_)
        )
    )


def _are_neighbours(model: Any) -> bool:
    """Whether each row of the training has a class, by its place."""
    if len(model._y) != model._fit_X.shape[0] or model._fit_X.shape[1] != model.n_features_in_:
        return False
    if not hasattr(model, "classes_"):
        return True
    several = isinstance(model.classes_, list)
    columns = model._y.T if several else [model._y.ravel()]
    classes = model.classes_ if several else [model.classes_]
    return all(
        _are_places(column, len(each)) for column, each in zip(columns, classes, strict=True)
    )


def _unsound(path: Path, what: str) -> IntegrityError:
    return IntegrityError(
        f"'{path.name}' holds {what}: refused; save it again with skops.io.dump()"
    )
