"""Pipelines of scikit-learn that take columns of strings and numbers, and trusted parts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.kernel_approximation import AdditiveChi2Sampler
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import SVC, LinearSVC

from modelport.exporters.cli.export import export
from modelport.exporters.formats import trees_onnx
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.onnx_session import OnnxParitySession
from modelport.exporters.sources import SourceRequest, trees
from modelport.exporters.sources.trees import skops_file
from modelport.gateway.types import Datatype, Tensor
from tests.exporters.test_export_trees import FEATURES, Y, dump, invoke
from tests.gateway.backends.embedded.runtimes import fp32, load, run


def _table() -> Any:
    """Numbers with holes, a category, and a text."""
    rng = np.random.default_rng(0)
    found = np.empty((120, 3), object)
    found[:, 0] = np.where(rng.random(120) < 0.1, np.nan, rng.standard_normal(120))
    found[:, 1] = rng.choice(["red", "Grün", "blue"], 120)
    found[:, 2] = rng.choice(["good dog", "bad CAT runs", ""], 120)
    return found


def _columns(encoder: Any) -> Any:
    """A pipeline of ``_table``."""
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    parts = [("n", numbers, [0]), ("c", encoder, [1]), ("t", TfidfVectorizer(), 2)]
    table = _table()
    return make_pipeline(ColumnTransformer(parts), LogisticRegression()).fit(
        table, table[:, 1] == "red"
    )


@pytest.mark.thorough
def test_columns_of_numbers_categories_and_texts_are_inputs(tmp_path: Path) -> None:
    model, repository = _columns(OneHotEncoder(handle_unknown="ignore")), tmp_path / "repository"
    dump(model, tmp_path / "columns.skops")
    done = invoke(
        export, tmp_path / "columns.skops", "--format", "onnx", "--repository", repository
    )
    assert done.exit_code == 0, done.output
    version = repository / "columns" / "1"
    backend = load(version, (version.parent / "config.pbtxt").read_text())
    rows = _table()[:5]
    named = [
        fp32(rows[:, :1].astype(np.float32), "column_0"),
        *(
            Tensor(
                f"column_{i}", Datatype.BYTES, np.array([[x.encode()] for x in rows[:, i]], object)
            )
            for i in (1, 2)
        ),
    ]
    (answer,) = run(backend, *named).outputs
    assert np.allclose(answer.data, model.predict_proba(rows), atol=1e-5)
    backend.unload()
    warmed = (repository / "columns" / "warmup" / "batch_1_input_1").read_bytes()
    length = int.from_bytes(warmed[:4], "little")
    assert len(warmed) == 4 + length, "a warm-up text has its length before it"


def test_columns_are_described_by_the_first_step_that_reads_them(tmp_path: Path) -> None:
    dump(_columns(OneHotEncoder()), tmp_path / "m.skops")
    source = trees.load(SourceRequest(tmp_path / "m.skops"))
    assert [(spec.name, str(spec.datatype)) for spec in source.signature.inputs] == [
        *(("column_0", "FP32"), ("column_1", "BYTES"), ("column_2", "BYTES"))
    ]
    assert "categories of column_1 that were not in the training" in source.notices[0]
    assert trees.load(SourceRequest(_counts(tmp_path))).signature.inputs[0].minimum == 0


def _counts(folder: Path) -> Path:
    model = make_pipeline(AdditiveChi2Sampler(), LogisticRegression(max_iter=1000)).fit(
        np.abs(FEATURES), Y
    )
    dump(model, folder / "counts.skops")
    return folder / "counts.skops"


def test_parts_of_scikit_learn_written_in_python_are_trusted_and_others_are_not() -> None:
    for name in (
        "sklearn.gaussian_process.kernels.RBF",
        "sklearn.feature_selection._univariate_selection.f_classif",
        "sklearn.neighbors._kd_tree.KDTree",
        "numpy.number",
    ):
        assert skops_file._is_plain(name), name
    for name in (
        "numpy.load",
        "sklearn.neighbors._kd_tree.np",
        "sklearn.neighbors._classification.KNeighborsClassifier.predict",
        "sklearn.datasets._base.load_files",
        "sklearn.utils._bunch.Bunch",
        "sklearn.gaussian_process.kernels.os",
        "sklearn.feature_selection._univariate_selection.safe_mask",
        "os.system",
    ):
        assert not skops_file._is_plain(name), name


#: Classifiers without probabilities; converters write one or two scores for two classes.
SCORES = {"linear": LinearSVC(), "ridge": RidgeClassifier(), "kernel": SVC()}


@pytest.mark.parametrize("classes", [Y, Y > 0], ids=["three", "two"])
@pytest.mark.parametrize("name", SCORES)
def test_a_classifier_without_probabilities_gives_its_scores(
    name: str, classes: Any, tmp_path: Path
) -> None:
    model = make_pipeline(StandardScaler(), clone(SCORES[name])).fit(FEATURES, classes)
    dump(model, tmp_path / "m.skops")
    fitted = trees.read(tmp_path / "m.skops")
    trees_onnx.export(SimpleNamespace(model=fitted), tmp_path / "m.onnx", ExportTarget())
    (found,) = OnnxParitySession(tmp_path / "m.onnx")({"features": FEATURES}).values()
    expected = model.decision_function(FEATURES)
    assert fitted.output == "scores"
    assert np.allclose(found, expected.reshape(len(FEATURES), -1), atol=1e-4)
