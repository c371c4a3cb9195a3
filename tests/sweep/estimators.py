"""Export every estimator of scikit-learn in a pipeline to ONNX, and compare it with scikit-learn.

    python -m tests.sweep.estimators [NAME …]

Transformers end their pipeline. What neither predicts nor transforms, or takes neither numbers,
categories nor texts, is left out.
Exits with 1 if an artifact is wrong or an export crashed.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner
from sklearn.base import is_classifier, is_outlier_detector, is_regressor
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.utils import all_estimators

from modelport.exporters.cli.export import export
from modelport.exporters.formats.onnx_session import OnnxParitySession
from modelport.exporters.sources import trees
from tests import verb
from tests.sweep.attempts import OPTIONS, REASONS, ExportVerdict
from tests.sweep.comparison import ATOL, RTOL

X, Y = make_classification(200, 6, n_informative=4, n_classes=3, random_state=0)
NUMBERS = X.astype(np.float32)
CATEGORIES = np.array([["red", "small"], ["blue", "large"]] * 100, object)
TEXTS = np.array(["red fox runs", "a lazy dog"] * 100)
TARGETS = (Y, X[:, 0], Y > 0, np.stack([Y, Y > 0], 1), np.exp(X[:, 0]))


def fitted(name: str, kind: type[Any]) -> Any:
    """A pipeline with an estimator of the class, or None."""
    known = inspect.signature(kind).parameters
    only = Ridge() if "Regress" in name else LogisticRegression()
    parts = [("a", StandardScaler()), ("b", MinMaxScaler())]
    if name == "SelfTrainingClassifier":  # its default is None, which it refuses
        return make_pipeline(StandardScaler(), kind(only)).fit(NUMBERS, Y)
    required = {
        **{"estimator": only, "estimators": [("a", only), ("b", only)], "steps": [("a", only)]},
        **{"transformers": [(*part, [0, 1, 2]) for part in parts], "transformer_list": parts},
        **{"param_grid": {}, "param_distributions": {}, "dictionary": np.eye(6)},
    }
    chosen = {n: required[n] for n, p in known.items() if p.default is p.empty and n in required}
    if "n_estimators" in known:
        chosen["n_estimators"] = 5
    for steps, rows, target in _attempts(kind, chosen):
        try:
            model = make_pipeline(*steps).fit(rows, target)
            (model.predict if hasattr(model, "predict") else model.transform)(rows[:3])
        except Exception:  # whatever the estimator raises on data of another kind
            continue
        return model
    return None


def _attempts(kind: type[Any], chosen: dict[str, Any]) -> Iterator[tuple[list[Any], Any, Any]]:
    try:
        one = kind(**chosen)
    except TypeError:
        return
    ends = is_classifier(one) or is_regressor(one) or is_outlier_detector(one)
    if ends or not hasattr(one, "transform"):
        for scaler in (StandardScaler(), MinMaxScaler()):
            for target in TARGETS:
                yield [scaler, kind(**chosen)], NUMBERS, target
        return
    for rows in (NUMBERS, np.abs(NUMBERS), CATEGORIES, TEXTS):
        yield [kind(**chosen)], rows, Y


def attempt(model: Any, folder: Path) -> tuple[ExportVerdict, str]:
    """Export ``model``; compare what is published with scikit-learn's own answers."""
    import skops.io.exceptions

    path, repository = folder / "m.skops", folder / "repository"
    try:
        skops.io.dump(model, path)
    except skops.io.exceptions.UnsupportedTypeException as error:
        return ExportVerdict.REFUSED, f"skops: {error}"
    done = CliRunner().invoke(
        export, [str(path), "--format", "onnx", "--repository", str(repository), *OPTIONS]
    )
    said = done.output.strip().removeprefix("modelport: error: ")
    if done.exit_code:
        refused = done.exit_code in REASONS and len(said.splitlines()) == 1
        return (ExportVerdict.REFUSED if refused else ExportVerdict.CRASHED), said[-300:]
    source = trees.load(trees.SourceRequest(path))
    assert source.spec.sample is not None
    inputs = source.spec.sample(source.signature, 100, {}, np.random.default_rng(1))
    (expected,) = source.reference(inputs).values()
    (found,) = OnnxParitySession(repository / "m" / "1" / "model.onnx")(inputs).values()
    error = np.abs(found - expected)
    right = found.shape == expected.shape and (error <= ATOL + RTOL * np.abs(expected)).all()
    return (ExportVerdict.PUBLISHED, "") if right else (ExportVerdict.WRONG, f"{error.max():.2g}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep.estimators", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for name, kind in all_estimators():
        if names and name not in names:
            continue
        model = fitted(name, kind)
        if model is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            verdict, detail = attempt(model, Path(folder))
        with_reason = "skl2onnx cannot" in detail or "skops" in detail
        counts[f"{verdict}, with the reason of a library" if with_reason else verdict] += 1
        print(f"{verdict:<10}{name:<36}{detail}", flush=True)
    print(", ".join(f"{key}: {count}" for key, count in counts.most_common()))
    return int(bool(counts[ExportVerdict.WRONG] + counts[ExportVerdict.CRASHED]))


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    verb.run(main)
