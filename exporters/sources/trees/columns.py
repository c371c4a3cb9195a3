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
#: Shares of random numbers that are missing, and 0.
MISSING, ZERO = 0.05, 0.05


@dataclass(slots=True)
class Column:
    """One column, by the first step that reads it.

    Attributes:
        values: the categories or the words that it may hold; empty for numbers.
        text: whether a value holds several of the words.
        unknown, missing: whether further categories, and NaN, are answered.
    """

    name: str
    values: Sequence[Any] = ()
    text: bool = False
    unknown: bool = True
    missing: bool = False

    @property
    def is_string(self) -> bool:
        return self.text or any(isinstance(value, str) for value in self.values)

    @property
    def spec(self) -> TensorSpec:
        """The input: one value in each row."""
        return TensorSpec(self.name, Datatype.BYTES if self.is_string else Datatype.FP32, (1,))

    def draw(self, rows: int, rng: np.random.Generator) -> Array:
        """Random values, ``[rows, 1]``."""
        values: list[Any] = [v for v in self.values if isinstance(v, str) or v == v]
        if not values and not self.text:
            found = 3 * rng.standard_normal(rows)
            found[rng.random(rows) < ZERO] = 0
            if self.missing:
                found[rng.random(rows) < MISSING] = np.nan
            return found.astype(np.float32)[:, None]
        if self.text:
            drawn = [" ".join(rng.choice([*values, UNKNOWN], rng.integers(WORDS + 1)))
                     for _ in range(rows)]  # fmt: skip
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
    vectorizer = next(_first(estimator), None)
    if _is_vectorizer(vectorizer):
        return [Column("text", _words(vectorizer), text=True)]
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
    while hasattr(step, "steps"):
        kept = [each for _, each in step.steps if each not in (None, "passthrough")]
        if not kept:
            return
        step = kept[0]
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
            if hasattr(step, "steps") and len(step.steps) > 1:
                _describe(step[1:], columns)
        else:
            for column, values in zip(columns, getattr(first, "categories_", ()), strict=False):
                column.values = list(values)
                column.unknown = getattr(first, "handle_unknown", "error") != "error"
