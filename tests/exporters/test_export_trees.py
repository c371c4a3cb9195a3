"""Models of scikit-learn and boosted trees: exact at each split, and read without pickles."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightgbm
import numpy as np
import onnxruntime
import pytest
import xgboost
from click.testing import CliRunner, Result
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cluster import KMeans
from sklearn.datasets import make_classification
from sklearn.ensemble import (
    BaggingClassifier,
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.multiclass import OutputCodeClassifier
from sklearn.multioutput import MultiOutputClassifier
from sklearn.naive_bayes import MultinomialNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    OneHotEncoder,
    SplineTransformer,
    StandardScaler,
)
from sklearn.semi_supervised import LabelPropagation
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeRegressor

from modelport.exporters.cli.export import export
from modelport.exporters.cli.verify import verify
from modelport.exporters.formats import scikit_learn_graphs, trees_onnx
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.sources import SourceRequest, reader_selection, trees
from modelport.gateway.errors import IntegrityError, Unsupported, UsageError
from tests.gateway.backends.embedded.runtimes import fp32, load, run

X, Y = make_classification(400, 6, n_informative=4, n_classes=3, random_state=0)
FEATURES = (X * 100).astype(np.float32)  # far from standard normal


def dump(model: Any, path: Path) -> None:
    import skops.io  # seconds, which other tests need not wait for

    skops.io.dump(model, path)


def _booster(objective: str, labels: Any, **more: Any) -> xgboost.Booster:
    parameters = {"objective": objective, "nthread": 1, "max_depth": 3, **more}
    return xgboost.train(parameters, xgboost.DMatrix(FEATURES, labels), 8)


def _lightgbm(objective: str, labels: Any, **more: Any) -> lightgbm.Booster:
    parameters = {"objective": objective, "verbose": -1, "num_threads": 1, **more}
    return lightgbm.train(parameters, lightgbm.Dataset(FEATURES, labels), 8)


def _missing() -> Any:
    holes = FEATURES.copy()
    holes[np.random.default_rng(0).random(holes.shape) < 0.1] = np.nan
    return xgboost.DMatrix(holes, Y > 0)


def catboost_models() -> dict[str, Any]:
    """Models that CatBoost 1.2.10 saved, rows, and its own answers to them."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "catboost_models.json").read_text())
    return found


CATBOOST = catboost_models()


#: Writes a model → the outputs of its signature.
SUBJECTS: dict[str, tuple[Callable[[Path], Any], str, int]] = {
    "binary.ubj": (lambda p: _booster("binary:logistic", Y > 0).save_model(p), "probabilities", 2),
    "holes.ubj": (
        lambda p: xgboost.train({"objective": "binary:logistic"}, _missing(), 8).save_model(p),
        *("probabilities", 2),
    ),
    "softmax.json": (
        lambda p: _booster("multi:softmax", Y, num_class=3).save_model(p),
        *("probabilities", 3),
    ),
    "count.ubj": (lambda p: _booster("count:poisson", Y).save_model(p), "prediction", 1),
    "binary.txt": (lambda p: _lightgbm("binary", Y > 0).save_model(p), "probabilities", 2),
    "classes.txt": (
        lambda p: _lightgbm("multiclass", Y, num_class=3).save_model(p),
        *("probabilities", 3),
    ),
    "tweedie.txt": (lambda p: _lightgbm("tweedie", Y).save_model(p), "prediction", 1),
    "catboost.json": (
        lambda p: p.write_text(json.dumps(CATBOOST["classes"]["model"])),
        *("probabilities", 3),
    ),
    "pipeline.skops": (
        lambda p: dump(make_pipeline(StandardScaler(), LogisticRegression()).fit(FEATURES, Y), p),
        *("probabilities", 3),
    ),
    "boosted.skops": (
        lambda p: dump(
            GradientBoostingClassifier(n_estimators=5).fit(FEATURES, np.where(Y, "yes", "no")),
            p,
        ),
        *("probabilities", 2),
    ),
    "forest.skops": (
        lambda p: dump(RandomForestRegressor(5, max_depth=4).fit(FEATURES, X[:, 0]), p),
        *("prediction", 1),
    ),
    "histograms.skops": (
        lambda p: dump(HistGradientBoostingClassifier(max_iter=3).fit(FEATURES, Y), p),
        *("probabilities", 3),
    ),
    "network.skops": (
        lambda p: dump(
            make_pipeline(StandardScaler(), MLPClassifier(4, max_iter=1000, random_state=0)).fit(
                FEATURES, Y
            ),
            p,
        ),
        *("probabilities", 3),
    ),
    "outliers.skops": (
        lambda p: dump(IsolationForest(n_estimators=5, random_state=0).fit(FEATURES), p),
        *("prediction", 1),
    ),
}


def write(folder: Path, name: str) -> Path:
    SUBJECTS[name][0](folder / name)
    return folder / name


def invoke(command: Any, *arguments: object) -> Result:
    return CliRunner().invoke(command, [*map(str, arguments), "--quiet"])


#: The others are tried by the thorough suite.
QUICK = ("binary.ubj",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each in QUICK else pytest.mark.thorough) for each in SUBJECTS],
)
def test_a_model_is_proven_published_verified_and_served(name: str, tmp_path: Path) -> None:
    path, repository = write(tmp_path, name), tmp_path / "repository"
    _, output, size = SUBJECTS[name]
    done = invoke(export, path, "--format", "onnx", "--repository", repository, "--json")
    assert done.exit_code == 0, done.output
    (result,) = json.loads(done.output)
    assert result["agreement"] == (1.0 if output == "probabilities" else None)
    version = repository / path.stem / "1"
    fitted = trees.read(path)
    backend = load(version, (version.parent / "config.pbtxt").read_text())
    rows = FEATURES[:4, : fitted.features]
    (answer,) = run(backend, fp32(rows, "features")).outputs
    assert (answer.name, answer.data.shape) == (output, (4, size))
    assert np.allclose(answer.data, fitted.predict(rows), atol=1e-5)
    backend.unload()
    done = invoke(verify, version, "--checkpoint", path)
    assert done.exit_code == 0, done.output


def test_the_names_of_the_classes_are_labels(tmp_path: Path) -> None:
    path, repository = write(tmp_path, "boosted.skops"), tmp_path / "repository"
    assert invoke(export, path, "--format", "onnx", "--repository", repository).exit_code == 0
    assert (repository / "boosted" / "labels.txt").read_text().split() == ["no", "yes"]


def test_the_proof_sees_that_a_converter_rounds_splits_to_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees_onnx, "_tighten", lambda model, fitted: None)
    path = write(tmp_path, "binary.txt")
    done = invoke(export, path, "--format", "onnx", "--repository", tmp_path / "repository")
    assert done.exit_code == 3, done.output
    assert "output 'probabilities' differs from the checkpoint's" in done.output


NAN = np.where(np.random.default_rng(0).random(FEATURES.shape) < 0.2, np.nan, FEATURES)
#: Estimators that take NaN, also after a training without it.
TAKE_NAN = {
    "tree": DecisionTreeRegressor(max_depth=6, random_state=0),
    "forest": RandomForestClassifier(4, random_state=0),
    "random splits": ExtraTreesClassifier(4, random_state=0),
    "bags": BaggingClassifier(n_estimators=3, max_features=0.5, random_state=0),
    "pipeline": make_pipeline(StandardScaler(), RandomForestRegressor(4, random_state=0)),
}


@pytest.mark.parametrize("trained", [FEATURES, NAN], ids=["numbers", "NaN"])
@pytest.mark.parametrize("name", TAKE_NAN)
def test_nan_takes_the_branch_that_it_takes_in_scikit_learn(
    name: str, trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump(clone(TAKE_NAN[name]).fit(trained, Y), tmp_path / "m.skops")
    fitted = trees.read(tmp_path / "m.skops")

    def rows_that_differ() -> int:
        trees_onnx.export(SimpleNamespace(model=fitted), tmp_path / "m.onnx", ExportTarget())
        session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
        (found,) = session.run(None, {"features": NAN})
        return int((np.abs(found - fitted.predict(NAN)) > 1e-4).any(1).sum())

    assert rows_that_differ() == 0
    monkeypatch.setattr(scikit_learn_graphs, "send_missing", lambda model, fitted: None)
    assert rows_that_differ() > 0


def test_probabilities_of_a_forest_are_never_above_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model.onnx"
    for trees_of_forest in (7, 20, 55):
        forest = RandomForestClassifier(trees_of_forest, random_state=0).fit(FEATURES, Y)
        dump(forest, tmp_path / f"forest{trees_of_forest}.skops")

    def largest() -> float:
        found = []
        for path in tmp_path.glob("*.skops"):
            trees_onnx.export(SimpleNamespace(model=trees.read(path)), target, ExportTarget())
            found.append(onnxruntime.InferenceSession(target).run(None, {"features": FEATURES})[0])
        assert min(map(np.min, found)) >= 0
        return float(max(map(np.max, found)))

    assert largest() == 1.0
    monkeypatch.setattr(trees_onnx, "AVERAGING", ())
    assert largest() > 1.0


def test_a_conversion_that_is_wrong_is_not_published(tmp_path: Path) -> None:
    path = tmp_path / "logistic.ubj"  # onnxmltools drops the link function
    _booster("reg:logistic", Y / 2).save_model(path)
    done = invoke(export, path, "--format", "onnx", "--repository", tmp_path / "repository")
    assert done.exit_code == 3, done.output
    assert not (tmp_path / "repository").exists()


def refused(path: Path, *more: str) -> Result:
    done = invoke(export, path, "--format", "onnx", "--output", path.parent / "out", *more)
    assert done.exit_code in (2, 4, 5), done.output
    assert len(done.output.strip().splitlines()) == 1, done.output
    return done


def test_what_has_no_conversion_is_refused_with_the_reason(tmp_path: Path) -> None:
    _booster("binary:logistic", Y > 0, booster="dart").save_model(tmp_path / "dart.ubj")
    assert "'dart' booster" in refused(tmp_path / "dart.ubj").output
    ranks = xgboost.DMatrix(FEATURES, Y, group=[200, 200])
    xgboost.train({"objective": "rank:ndcg"}, ranks, 2).save_model(tmp_path / "rank.ubj")
    assert "objective 'rank:ndcg'" in refused(tmp_path / "rank.ubj").output
    columns = FEATURES.copy()
    columns[:, 0] = Y
    data = lightgbm.Dataset(columns, Y > 0, categorical_feature=[0])
    lightgbm.train({"verbose": -1, "min_data_per_group": 1}, data, 3).save_model(
        tmp_path / "cat.txt"
    )
    assert "splits on categories" in refused(tmp_path / "cat.txt").output
    dump(OutputCodeClassifier(LogisticRegression()).fit(FEATURES, Y), tmp_path / "code.skops")
    assert "does not know sklearn.multiclass.Output" in refused(tmp_path / "code.skops").output
    several = MultiOutputClassifier(LogisticRegression()).fit(FEATURES, np.c_[Y > 0, Y > 1])
    dump(several, tmp_path / "several.skops")
    assert "probabilities of 2 outputs" in refused(tmp_path / "several.skops").output
    dump(LabelPropagation().fit(FEATURES, Y), tmp_path / "spread.skops")
    assert "does not know sklearn.semi_sup" in refused(tmp_path / "spread.skops").output
    dump(make_pipeline(SplineTransformer(), Ridge()).fit(FEATURES, Y), tmp_path / "spline.skops")
    said = refused(tmp_path / "spline.skops").output
    assert "BSpline, whose content nothing checks: not loaded; use another" in said
    dump(LogisticRegression(), tmp_path / "raw.skops")
    assert "is not fitted" in refused(tmp_path / "raw.skops").output
    path = write(tmp_path, "binary.ubj")
    assert "omit --model" in refused(path, "--model", "fraud").output
    assert "cannot be converted to torchscript" in refused(path, "--format", "torchscript").output
    assert "--opset 20 is not supported" in refused(path, "--opset", "20").output


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    for name in ("model.pkl", "model.joblib"):
        (tmp_path / name).write_bytes(pickle.dumps({}))
        assert "is a pickle, which runs code" in refused(tmp_path / name).output


def test_a_file_of_skops_that_wants_to_run_code_is_not_loaded(tmp_path: Path) -> None:
    def spare(x: Any) -> Any:
        return x

    path = tmp_path / "evil.skops"
    pipeline = make_pipeline(FunctionTransformer(spare), LogisticRegression())
    pipeline.steps[0][1].func = print
    dump(pipeline, path)
    done = refused(path)
    assert done.exit_code == 5
    assert "builtins.print, which may run code" in done.output


def test_a_tree_whose_nodes_point_outside_it_is_refused(tmp_path: Path) -> None:
    model = RandomForestRegressor(2, max_depth=2).fit(FEATURES, X[:, 0])
    _mislead(model.estimators_[1].tree_)
    hidden = RandomForestClassifier(2, max_depth=2)
    calibrated = CalibratedClassifierCV(hidden, cv=2).fit(FEATURES, Y)
    _mislead(calibrated.calibrated_classifiers_[0].estimator.estimators_[0].tree_)
    nested = RandomForestClassifier(2, max_depth=2).fit(FEATURES, Y)
    _mislead(nested.estimators_[0].tree_)
    for _ in range(4):
        nested = make_pipeline(nested)
    histograms = HistGradientBoostingClassifier(max_iter=1).fit(FEATURES, Y)
    histograms._predictors[0][0].nodes["left"][0] = 10_000
    for each in (model, calibrated, nested, histograms):
        dump(each, tmp_path / "evil.skops")
        done = refused(tmp_path / "evil.skops")
        assert "nodes point outside it" in done.output


def _mislead(tree: Any) -> None:
    state = tree.__getstate__()
    state["nodes"]["left_child"][0] = 10_000
    tree.__setstate__(state)


def _narrow_tree() -> Any:
    model = DecisionTreeRegressor(max_depth=2).fit(FEATURES, Y)
    model.n_features_in_ = 2
    return model


def _narrow_forest() -> Any:
    model = RandomForestClassifier(2, max_depth=2).fit(FEATURES, Y)
    model.n_features_in_ = 2
    return model


def _more_columns_than_first_answers() -> Any:
    model = GradientBoostingClassifier(n_estimators=2).fit(FEATURES, Y)
    model.estimators_ = np.concatenate([model.estimators_] * 100, axis=1)
    return model


def _encoder_without_a_column() -> Any:
    codes = np.c_[Y, FEATURES]
    model = HistGradientBoostingClassifier(max_iter=1, categorical_features=[0]).fit(codes, Y)
    model._preprocessor._transformer_to_input_indices["numerical"].pop()
    return model


def _vectors_without_coefficients() -> Any:
    model = SVC().fit(FEATURES, Y)
    model._dual_coef_ = model._dual_coef_[:, :1].copy()
    return model


def _neighbours_of_no_class() -> Any:
    model = KNeighborsClassifier(metric="manhattan").fit(FEATURES, Y)
    model._y = model._y + 1_000_000_000
    return model


def _centres_without_columns() -> Any:
    model = KMeans(2).fit(FEATURES)
    model.cluster_centers_ = model.cluster_centers_[:, :1].copy()
    return model


def _words_of_no_column() -> Any:
    model = make_pipeline(CountVectorizer(), MultinomialNB()).fit(["good", "bad"], [0, 1])
    model[0].vocabulary_["good"] = 1_000_000_000
    return model


def _categories_of_no_column() -> Any:
    encoder = OneHotEncoder(sparse_output=False, handle_unknown="ignore")
    model = make_pipeline(encoder, LogisticRegression()).fit(np.c_[range(400)] % 90, Y)
    model[0]._n_features_outs = [1]
    return model


@pytest.mark.parametrize(
    "make",
    [
        *(_narrow_tree, _narrow_forest, _more_columns_than_first_answers),
        *(_encoder_without_a_column, _vectors_without_coefficients, _neighbours_of_no_class),
        *(_centres_without_columns, _words_of_no_column, _categories_of_no_column),
    ],
)
def test_arrays_that_compiled_code_would_leave_are_refused(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    dump(make(), tmp_path / "evil.skops")
    done = refused(tmp_path / "evil.skops")
    assert done.exit_code == 5
    assert "arrays do not fit each other" in done.output or "a sparse matrix" in done.output


@pytest.mark.parametrize("name", ["binary.ubj", "softmax.json", "pipeline.skops"])
def test_a_damaged_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, name)
    whole = path.read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises((IntegrityError, UsageError, Unsupported)) as caught:
            reader_selection.load(SourceRequest(path))
        assert "\n" not in str(caught.value)


@pytest.mark.thorough
def test_a_file_that_ends_the_process_which_reads_it_is_refused(
    tmp_path: Path, trials: Path
) -> None:
    path = write(tmp_path, "binary.txt")
    assert reader_selection.load(SourceRequest(path)).spec.name == "binary"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])  # LightGBM aborts
    with pytest.raises(IntegrityError, match="the process that tried it ended with signal"):
        reader_selection.load(SourceRequest(path))


@pytest.mark.parametrize("name", CATBOOST)
def test_a_catboost_model_answers_as_the_library_does(name: str, tmp_path: Path) -> None:
    """Rows lie at borders, one float above them, and are missing."""
    recorded = CATBOOST[name]
    (tmp_path / "m.json").write_text(json.dumps(recorded["model"]))
    fitted = trees.read(tmp_path / "m.json")
    rows = np.array(recorded["rows"], np.float32)
    assert np.allclose(fitted.predict(rows), recorded["answers"], rtol=1e-12)
    trees_onnx.export(SimpleNamespace(model=fitted), tmp_path / "m.onnx", ExportTarget())
    (found,) = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"features": rows})
    assert found.shape == (len(rows), fitted.outputs)
    assert np.allclose(found, recorded["answers"], atol=1e-6)
    assert fitted.classes == (["high", "low", "middle"] if name == "classes" else fitted.classes)


#: Path of a value in the symmetric model → what is there instead, and a part of the refusal.
CONTRADICTIONS: tuple[tuple[tuple[Any, ...], Any, str], ...] = (
    (("oblivious_trees", 0, "leaf_values"), [1.0], "2 splits and 1 leaf_values"),
    (("oblivious_trees", 0, "splits"), [{"split_type": "FloatFeature"}] * 99, "99 splits and"),
    (("oblivious_trees", 0, "splits", 0, "float_feature_index"), 9, "is of no feature"),
    (("oblivious_trees", 0, "splits", 0, "split_type"), "OnlineCtr", "of kind 'OnlineCtr'"),
    (("oblivious_trees", 0, "leaf_values", 0), "1", "oblivious_trees.0.leaf_values.0"),
    (("oblivious_trees",), [], "it has no trees"),
    (("trees",), [{"split": {"split_type": "FloatFeature"}}], "has not two branches"),
    (("trees",), [{"value": [1.0, 2.0]}], "a leaf has 2 values"),
    (("scale_and_bias",), [1, [0, 0]], "2 outputs do not fit"),
    (("features_info", "float_features", 0, "flat_feature_index"), 7, "not numbered from 0"),
    (("features_info", "categorical_features"), [{}], "has categorical features"),
    (("model_info", "params", "loss_function", "type"), "MultiLogloss", "of several labels"),
    (("model_info", "params", "loss_function", "type"), "Own", "classifier with loss 'Own'"),
)


@pytest.mark.parametrize(("path", "value", "part"), CONTRADICTIONS)
def test_a_catboost_file_that_has_no_conversion_is_refused_with_the_place(
    path: tuple[Any, ...], value: Any, part: str, tmp_path: Path
) -> None:
    model = catboost_models()["binary"]["model"]
    place = model
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "m.json").write_text(json.dumps(model))
    with pytest.raises((IntegrityError, Unsupported), match=part) as caught:
        trees.read(tmp_path / "m.json")
    assert "\n" not in str(caught.value)


def test_trees_of_catboost_that_nest_without_end_are_refused(tmp_path: Path) -> None:
    text = json.dumps(CATBOOST["not-symmetric"]["model"])
    deep = '{"left":' * 20_000
    (tmp_path / "m.json").write_text(text.replace('"trees": [', f'"trees": [{deep}'))
    with pytest.raises(IntegrityError, match="recursion limit"):
        trees.read(tmp_path / "m.json")


def test_the_binary_format_of_catboost_is_refused_with_the_one_that_works(tmp_path: Path) -> None:
    (tmp_path / "m.cbm").write_bytes(b"CBM1")
    assert "save_model('model.json', format='json')" in refused(tmp_path / "m.cbm").output
