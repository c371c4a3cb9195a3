"""Answers as tensors: a row for each text, with items such as a label and its score.

Rows with fewer items than the longest are filled up: empty strings, and -1 for numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, Tensor, TensorSpec

Item = Mapping[str, Any]
FILLING = -1
#: The name of the number that tells items from filling.
SCORE = "score"


def tensors(rows: Sequence[Sequence[Item]], specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Make a tensor of each entry of the items."""
    longest = max(map(len, rows))
    return [Tensor(spec.name, spec.datatype, _column(rows, spec, longest)) for spec in specs]


def items(outputs: Sequence[Tensor]) -> list[list[dict[str, Any]]]:
    """The rows of items that ``tensors`` has made tensors of."""
    columns = {tensor.name: tensor for tensor in outputs}
    values = [_values(tensor) for tensor in outputs]
    found = []
    for row in zip(*values, strict=True):
        entries = (dict(zip(columns, item, strict=True)) for item in zip(*row, strict=True))
        found.append([entry for entry in entries if entry[SCORE] != FILLING])
    return found


def softmax(logits: Array) -> Array:
    """Probabilities along the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: Array = powers / powers.sum(axis=-1, keepdims=True)
    return result


def _column(rows: Sequence[Sequence[Item]], spec: TensorSpec, longest: int) -> Array:
    texts = spec.datatype is Datatype.BYTES
    column = np.full((len(rows), longest), b"" if texts else FILLING, NUMPY_DTYPES[spec.datatype])
    for index, row in enumerate(rows):
        for place, item in enumerate(row):
            value = item[spec.name]
            column[index, place] = value.encode("utf-8", "replace") if texts else value
    return column


def _values(tensor: Tensor) -> list[list[Any]]:
    if tensor.datatype is not Datatype.BYTES:
        numbers: list[list[Any]] = tensor.data.tolist()
        return numbers
    return [[item.decode() for item in row] for row in tensor.data]
