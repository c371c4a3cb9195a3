"""Columns of texts, categories and numbers that a scikit-learn pipeline takes, each an input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelport.gateway.types import Array, Datatype, TensorSpec

#: A text and a category that no training has seen, and their shares of random values.
UNKNOWN, SHARE = "Öl 7 unseen", 0.1
WORDS = 8  # the most words of a random text
#: Text between words: of one letter, in capitals, of another alphabet.
BETWEEN = (" ", " ", " ", ", ", " a ", "! I'm ", " ПРИВЕТ ", " größe_2 ", "-")
#: Shares of random numbers that are missing, 0, and whole; XGBoost splits at values of training.
MISSING, ZERO, WHOLE = 0.05, 0.05, 0.5


#: Attributes with a fitted estimator that reads what its holder reads.
HOLDERS = ("best_estimator_", "regressor_")


@dataclass(slots=True)
class Column:
    """One column, by the first step that reads it.

    Attributes:
        values: the categories or the words that it may hold; empty for numbers.
        text: whether a value holds several of the words.
        unknown, missing: whether further categories, and NaN, are answered.
        centre, spread: of a number in training, as far as they are known.
        minimum: 0 of a number that must not be negative.
    """

    name: str
    values: Sequence[Any] = ()
    text: bool = False
    unknown: bool = True
    missing: bool = False
    centre: float = 0.0
    spread: float = 3.0
    minimum: float | None = None

    @property
    def is_string(self) -> bool:
        return self.text or any(isinstance(value, str) for value in self.values)

    @property
    def spec(self) -> TensorSpec:
        """The input: one value in each row."""
        kind = Datatype.BYTES if self.is_string else Datatype.FP32
        return TensorSpec(self.name, kind, (1,), self.minimum)

    def draw(self, rows: int, rng: np.random.Generator) -> Array:
        """Random values, ``[rows, 1]``."""
        values: list[Any] = [v for v in self.values if isinstance(v, str) or v == v]
        if not values and not self.text:
            found = self.centre + self.spread * rng.standard_normal(rows)
            found = np.where(rng.random(rows) < WHOLE, np.round(found), found)
            if self.minimum is not None:
                found = np.abs(found)
            found[rng.random(rows) < ZERO] = 0
            if self.missing:
                found[rng.random(rows) < MISSING] = np.nan
            return found.astype(np.float32)[:, None]
        if self.text:
            drawn = [
                "".join(
                    word + rng.choice(BETWEEN)
                    for word in rng.choice([*values, UNKNOWN], rng.integers(WORDS + 1))
                )
                for _ in range(rows)
            ]
        else:
            drawn = [values[i] for i in rng.integers(len(values), size=rows)]
        if not self.is_string:
            return np.asarray(drawn, np.float32)[:, None]
        if self.unknown and not self.text:
            drawn = [UNKNOWN if rng.random() < SHARE else value for value in drawn]
        found = np.empty((rows, 1), object)
        found[:, 0] = [str(value).encode() for value in drawn]
        return found


def columns_of(estimator: Any) -> list[Column]:
    """The columns of an estimator that takes strings, categories or named columns; else none."""
    first = next(_first(estimator), None)
    readers = [part for _, part in getattr(first, "transformer_list", [("", first)])]
    vectorizers = [reader for part in readers for reader in _first(part)]
    if vectorizers and all(map(_is_vectorizer, vectorizers)):
        words = [word for vectorizer in vectorizers for word in _words(vectorizer)]
        return [Column("text", words, text=True)]
    count = int(getattr(estimator, "n_features_in_", 0))
    named = getattr(estimator, "feature_names_in_", None)
    names = [f"column_{i}" for i in range(count)] if named is None else list(map(str, named))
    found = [Column(name) for name in names]
    _describe(estimator, found)
    if any(column.is_string or column.values for column in found):
        return found
    splits = any(hasattr(step, "transformers_") for step in _first(estimator))
    return found if splits and named is not None else []


def table(columns: Sequence[Column], inputs: Mapping[str, Array]) -> Array:
    """The rows that scikit-learn takes: a list of texts, or a matrix of objects."""
    if len(columns) == 1 and columns[0].text:
        return np.array([_plain(x) for x in inputs[columns[0].name][:, 0]], object)
    kind = object if any(column.is_string for column in columns) else np.float32
    found = np.empty((len(inputs[columns[0].name]), len(columns)), kind)
    for place, column in enumerate(columns):
        found[:, place] = [_plain(value) for value in inputs[column.name][:, 0]]
    return found


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _first(step: Any) -> Iterator[Any]:
    """The estimator that reads the input of ``step``: the first of a pipeline."""
    while True:
        held = next((getattr(step, name) for name in HOLDERS if hasattr(step, name)), None)
        if held is not None:
            step = held
        elif hasattr(step, "steps"):
            kept = [each for _, each in step.steps if each not in (None, "passthrough")]
            if not kept:
                return
            step = kept[0]
        else:
            break
    yield step


def _is_vectorizer(step: Any) -> bool:
    return hasattr(step, "build_analyzer")


def _words(vectorizer: Any) -> list[str]:
    return [str(word) for word in getattr(vectorizer, "vocabulary_", ())]


def _describe(step: Any, columns: Sequence[Column]) -> None:
    """Note in ``columns`` what ``step`` does to each."""
    for first in _first(step):
        if hasattr(first, "_transformer_to_input_indices"):
            for name, transformer, _ in first.transformers_:
                chosen = [columns[i] for i in first._transformer_to_input_indices.get(name, ())]
                _describe(transformer, chosen)
        elif hasattr(first, "transformer_list"):
            for _, transformer in first.transformer_list:
                _describe(transformer, columns)
        elif _is_vectorizer(first):
            for column in columns:
                column.values, column.text = _words(first), True
        elif hasattr(first, "statistics_"):
            for column, value in zip(columns, first.statistics_, strict=False):
                column.missing = not isinstance(value, str)
                column.values = [value] if isinstance(value, str) else ()
                column.centre = column.centre if isinstance(value, str) else float(value)
            if hasattr(step, "steps") and len(step.steps) > 1:
                _describe(step[1:], columns)
        else:
            for column, values in zip(columns, getattr(first, "categories_", ()), strict=False):
                column.values = list(values)
                column.unknown = getattr(first, "handle_unknown", "error") != "error"
            for attribute, measured in (("centre", centre_of(first)), ("spread", spread_of(first))):
                if measured is not None and np.size(measured) in (1, len(columns)):
                    for column, value in zip(
                        columns, np.resize(measured, len(columns)), strict=True
                    ):
                        setattr(column, attribute, float(value))


def centre_of(step: Any) -> Array | None:
    """The means of the features in training, as a first step such as StandardScaler knows them."""
    if hasattr(step, "data_min_"):
        return np.asarray((step.data_min_ + step.data_max_) / 2)
    known = (getattr(step, name, None) for name in ("mean_", "center_"))
    return next((np.asarray(value) for value in known if value is not None), None)


def spread_of(step: Any) -> Array | None:
    """Their spread, likewise."""
    if hasattr(step, "data_range_"):
        return np.asarray(step.data_range_) / 4
    scale = getattr(step, "scale_", None)
    return None if scale is None else np.asarray(scale)
