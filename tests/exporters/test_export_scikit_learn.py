"""Parts of scikit-learn that skl2onnx lacks or converts wrongly: the same answers in ONNX."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightgbm
import numpy as np
import pytest
import xgboost
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    VotingClassifier,
)
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.feature_selection import RFE
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import FixedThresholdClassifier, RandomizedSearchCV
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import (
    FunctionTransformer,
    KBinsDiscretizer,
    OneHotEncoder,
    StandardScaler,
)
from sklearn.semi_supervised import SelfTrainingClassifier
from sklearn.svm import LinearSVC

from modelport.exporters.formats import scikit_learn_graphs, scikit_learn_onnx, trees_onnx
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.onnx_session import OnnxParitySession
from modelport.exporters.sources import SourceRequest, trees
from modelport.exporters.sources.trees import skops_file
from modelport.gateway.errors import IntegrityError, Unsupported
from modelport.gateway.types import Datatype
from tests.exporters.test_export_trees import FEATURES, NAN, X, Y, dump

RNG = np.random.default_rng(5)
#: Two columns of categories as numbers, and two of numbers.
CODES = np.c_[RNG.integers(0, 12, 400), RNG.integers(3, 7, 400), FEATURES[:, :2]].astype(np.float32)
ODD = (CODES[:, 0] % 2 + (CODES[:, 1] > 4)) > 0
FRESH = CODES[:60].copy()
FRESH[::7, 0], FRESH[::5, 1], FRESH[::11, 2] = 99, np.nan, np.nan
HISTOGRAMS = {"categorical_features": [0, 1], "max_iter": 5, "random_state": 0}
CLOSE = FEATURES[:50] + np.float32(0.5)
#: A fitted model, and rows that it has not seen.
MODELS: dict[str, tuple[Any, Any]] = {
    "categories": (HistGradientBoostingClassifier(**HISTOGRAMS).fit(CODES, ODD), FRESH),
    "categories of a regressor": (
        HistGradientBoostingRegressor(**HISTOGRAMS).fit(CODES[:, [1, 0, 3, 2]], CODES[:, 0] % 3),
        FRESH[:, [1, 0, 3, 2]],
    ),
    "counts by categories": (
        HistGradientBoostingRegressor(**HISTOGRAMS, loss="poisson").fit(CODES, CODES[:, 0] % 3),
        FRESH,
    ),
    "indicator": (
        make_pipeline(SimpleImputer(add_indicator=True), Ridge()).fit(NAN, X[:, 0]),
        NAN[:50],
    ),
    "function": (
        make_pipeline(FunctionTransformer(np.log1p), Ridge()).fit(np.abs(FEATURES), X[:, 0]),
        np.abs(CLOSE),
    ),
    "target of logarithms": (
        TransformedTargetRegressor(
            make_pipeline(StandardScaler(), Ridge()), func=np.log1p, inverse_func=np.expm1
        ).fit(FEATURES, np.abs(X[:, 0])),
        CLOSE,
    ),
    "scaled targets": (
        TransformedTargetRegressor(
            make_pipeline(StandardScaler(), Ridge()), transformer=StandardScaler()
        ).fit(FEATURES, 5 + X[:, :2] * 9),
        CLOSE,
    ),
    "votes": (
        make_pipeline(
            StandardScaler(),
            VotingClassifier([("a", LogisticRegression()), ("b", GaussianNB())], voting="soft"),
        ).fit(FEATURES, Y),
        CLOSE,
    ),
    "neighbours": (KNeighborsClassifier(weights="distance").fit(FEATURES, Y), CLOSE),
    "neighbours' mean": (
        KNeighborsRegressor(weights="distance", algorithm="ball_tree").fit(FEATURES, X[:, 0]),
        CLOSE,
    ),
    "isotonic": (
        make_pipeline(
            StandardScaler(), CalibratedClassifierCV(LinearSVC(), method="isotonic", cv=2)
        ).fit(FEATURES, Y),
        CLOSE,
    ),
    "search": (
        RandomizedSearchCV(
            make_pipeline(StandardScaler(), Ridge()), {"ridge__alpha": [1, 2]}, n_iter=2, cv=2
        ).fit(FEATURES, X[:, 0]),
        CLOSE,
    ),
    "elimination": (RFE(Ridge(), n_features_to_select=2).fit(FEATURES, X[:, 0]), CLOSE),
    "threshold": (FixedThresholdClassifier(GaussianNB(), threshold=0.7).fit(X, Y > 0), CLOSE),
    "self-training": (SelfTrainingClassifier(GaussianNB()).fit(X, np.where(X[:, 5] > 0, Y, -1)), X),
    "transformer": (StandardScaler().fit(FEATURES), CLOSE),
    "xgboost": (
        make_pipeline(StandardScaler(), xgboost.XGBClassifier(n_estimators=3)).fit(FEATURES, Y),
        CLOSE,
    ),
    "bins": (
        make_pipeline(KBinsDiscretizer(4, quantile_method="averaged_inverted_cdf"), Ridge()).fit(
            FEATURES, X[:, 0]
        ),
        CLOSE,
    ),
    "lightgbm": (
        make_pipeline(
            StandardScaler(), lightgbm.LGBMRegressor(n_estimators=3, verbose=-1, n_jobs=1)
        ).fit(FEATURES, X[:, 0]),
        CLOSE,
    ),
}


def answer(fitted: Any, inputs: dict[str, Any], folder: Path) -> Any:
    source: Any = SimpleNamespace(model=fitted)
    trees_onnx.export(source, folder / "m.onnx", ExportTarget())
    (found,) = OnnxParitySession(folder / "m.onnx")(inputs).values()
    return found


def shares(model: Any, rows: Any, folder: Path) -> float:
    """The share of rows with the model's own answer."""
    dump(model, folder / "m.skops")
    fitted = trees.read(folder / "m.skops")
    method = {"prediction": "predict", "transformed": "transform"}.get(
        fitted.output, "predict_proba"
    )
    expected = getattr(model, method)(rows).reshape(len(rows), -1)
    found = answer(fitted, {"features": np.asarray(rows, np.float32)}, folder)
    assert found.shape == expected.shape
    return float(np.isclose(found, expected, rtol=1e-3, atol=1e-4).all(1).mean())


@pytest.mark.parametrize("name", MODELS)
def test_onnx_answers_as_scikit_learn_does(name: str, tmp_path: Path) -> None:
    assert shares(*MODELS[name], tmp_path) == 1.0


@pytest.mark.parametrize(
    ("name", "repair"), [("neighbours", "weigh_by_distance"), ("isotonic", "interpolate")]
)
def test_skl2onnx_still_needs_the_repair(
    name: str, repair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scikit_learn_graphs, repair, lambda model: None)
    assert shares(*MODELS[name], tmp_path) < 1.0


SENTENCES = ["a good dog", "I am a dog, not good", "größe x größe_2", "привет dog!", "DOG good"]


def test_random_texts_show_that_tokens_of_skl2onnx_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = make_union(CountVectorizer(ngram_range=(1, 2)), TfidfVectorizer())
    model = make_pipeline(words, LogisticRegression())
    dump(model.fit(SENTENCES, [0, 1, 0, 1, 0]), tmp_path / "m.skops")
    source = trees.load(SourceRequest(tmp_path / "m.skops"))
    assert source.spec.sample is not None
    inputs = source.spec.sample(source.signature, 40, {}, np.random.default_rng(0))
    (expected,) = source.reference(inputs).values()
    assert np.allclose(answer(source.model, inputs, tmp_path), expected, atol=1e-5)
    monkeypatch.setattr(scikit_learn_onnx, "TOKENS", {})
    assert not np.allclose(answer(source.model, inputs, tmp_path), expected, atol=1e-5)


def _from_frame(model: Any, names: list[str]) -> Any:
    """``model`` as if it had been fitted to a data frame, which the tests do not install."""
    columns = model.steps[0][1]
    columns.feature_names_in_ = np.array(names, object)
    columns.transformers_ = [
        (name, part, names[places] if isinstance(places, int) else [names[i] for i in places])
        for name, part, places in columns.transformers_
    ]
    columns._sklearn_output_config = {"transform": "pandas"}
    return model


def _frame() -> tuple[Any, Any]:
    rows = np.empty((120, 3), object)
    rows[:, 0] = 20_000 + 5_000 * RNG.standard_normal(120)
    rows[:, 1] = RNG.choice(["red", "Grün"], 120)
    rows[:, 2] = RNG.integers(0, 2, 120)
    encoder = OneHotEncoder(handle_unknown="infrequent_if_exist", sparse_output=False)
    parts = [("n", StandardScaler(), [0]), ("c", encoder, [1])]
    calibrated = CalibratedClassifierCV(LinearSVC(), method="isotonic", cv=2)
    model = make_pipeline(ColumnTransformer(parts, remainder="passthrough"), calibrated)
    return model.fit(rows, (rows[:, 0] > 21_000) ^ (RNG.random(120) < 0.2)), rows


def test_a_pipeline_of_a_data_frame_has_its_columns_as_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = _frame()
    expected = model.predict_proba(rows)
    dump(_from_frame(model, ["income", "city", "member"]), tmp_path / "m.skops")
    source = trees.load(SourceRequest(tmp_path / "m.skops"))
    assert [(spec.name, spec.datatype) for spec in source.signature.inputs] == [
        *(("income", Datatype.FP32), ("city", Datatype.BYTES), ("member", Datatype.FP32))
    ]
    inputs = {
        "income": rows[:, :1].astype(np.float32),
        "city": np.array([[each.encode()] for each in rows[:, 1]], object),
        "member": rows[:, 2:].astype(np.float32),
    }
    assert np.allclose(answer(source.model, inputs, tmp_path), expected, atol=1e-4)
    assert np.allclose(source.reference(inputs)["probabilities"], expected, atol=1e-4)
    # Random values lie where the training's lay, and so find a wrong conversion.
    assert source.spec.sample is not None
    drawn = source.spec.sample(source.signature, 64, {}, np.random.default_rng(0))
    assert 15_000 < np.median(drawn["income"]) < 25_000
    monkeypatch.setattr(scikit_learn_graphs, "interpolate", lambda model: None)
    (right,) = source.reference(drawn).values()
    assert not np.allclose(answer(source.model, drawn, tmp_path), right, atol=1e-3)


@pytest.fixture
def counts(tmp_path: Path) -> Any:
    """Boosted trees of scaled whole numbers and texts that an imputer reads first."""
    rng = np.random.default_rng(5)
    rows = np.empty((300, 5), object)
    rows[:, :4] = rng.integers((1960, 1900, 0, 50), (2020, 2000, 1500, 90), (300, 4))
    rows[:, 4] = rng.choice(["a", "b"], 300)
    text = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder())
    columns = ColumnTransformer([("n", StandardScaler(), [0, 1, 2, 3]), ("c", text, [4])])
    booster = xgboost.XGBRegressor(n_estimators=20, max_depth=4)
    target = np.sin(rows[:, :4].astype(float)).sum(1) + (rows[:, 4] == "a")
    dump(make_pipeline(columns, booster).fit(rows, target), tmp_path / "m.skops")
    return trees.load(SourceRequest(tmp_path / "m.skops"))


def test_whole_numbers_stay_on_their_side_of_a_scaled_split(
    counts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = counts.spec.sample(counts.signature, 200, {}, np.random.default_rng(0))
    (expected,) = counts.reference(inputs).values()
    assert np.allclose(answer(counts.model, inputs, tmp_path), expected, atol=1e-4)
    monkeypatch.setattr(scikit_learn_graphs, "lower_splits", lambda model: None)
    assert not np.allclose(answer(counts.model, inputs, tmp_path), expected, atol=1e-4)


@pytest.mark.parametrize("unknown", ["infrequent_if_exist", "ignore"])
def test_infrequent_categories_are_one_group(unknown: str, tmp_path: Path) -> None:
    rows = np.array([["a", "x"]] * 9 + [["b", "y"], ["c", "x"], ["a", "z"]] * 2, object)
    encoder = OneHotEncoder(handle_unknown=unknown, min_frequency=3)
    model = make_pipeline(encoder, Ridge()).fit(rows, np.arange(15) % 4)
    dump(model, tmp_path / "m.skops")
    fresh = np.array([["a", "z"], ["b", "x"], ["c", "new"], ["new", "y"], ["a", "x"]], object)
    inputs = {
        f"column_{i}": np.array([[each.encode()] for each in fresh[:, i]], object) for i in (0, 1)
    }
    found = answer(trees.read(tmp_path / "m.skops"), inputs, tmp_path)
    assert np.allclose(found[:, 0], model.predict(fresh), atol=1e-5)


def test_a_column_that_takes_no_negative_numbers_says_so(tmp_path: Path) -> None:
    parts = [("log", FunctionTransformer(np.log1p), [0]), ("c", OneHotEncoder(), [1])]
    rows = np.array([[1, "a"], [3, "b"], [5, "a"], [0, "b"]], object)
    model = make_pipeline(ColumnTransformer(parts), Ridge())
    model.steps[0][1].transformers[0][1].validate = True
    dump(model.fit(rows, [1, 2, 3, 4]), tmp_path / "m.skops")
    numbers, texts = trees.load(SourceRequest(tmp_path / "m.skops")).signature.inputs
    assert (numbers.minimum, texts.minimum) == (0, None)


def test_a_part_without_a_conversion_is_named(tmp_path: Path) -> None:
    functions = make_pipeline(FunctionTransformer(np.arcsinh), Ridge()).fit(FEATURES, Y)
    names = make_pipeline(
        VotingClassifier([("a", GaussianNB()), ("b", LogisticRegression(max_iter=1000))])
    ).fit(FEATURES, np.where(Y, "yes", "no"))
    for model, reason in ((functions, "arcsinh"), (names, "wrap it in CalibratedClassifierCV")):
        dump(model, tmp_path / "m.skops")
        with pytest.raises(Unsupported, match=reason):
            shares(model, FEATURES, tmp_path)


def test_sets_of_categories_outside_a_tree_are_refused(tmp_path: Path) -> None:
    model = HistGradientBoostingClassifier(**HISTOGRAMS).fit(CODES, ODD)
    nodes = next(
        tree.nodes
        for row in model._predictors
        for tree in row
        if tree.nodes["is_categorical"].any()
    )
    nodes["bitset_idx"][nodes["is_categorical"] == 1] = 10_000
    dump(model, tmp_path / "m.skops")
    with pytest.raises(IntegrityError, match="point outside it"):
        trees.read(tmp_path / "m.skops")


def test_a_search_tree_is_never_asked(tmp_path: Path) -> None:
    model = MODELS["neighbours"][0]
    assert model._tree is not None
    dump(model, tmp_path / "m.skops")
    loaded = skops_file.read(tmp_path / "m.skops")
    assert (loaded._tree, loaded._fit_method) == (None, "brute")
