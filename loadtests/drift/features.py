"""Features of recorded requests: a column of values for each element of a row.

A tensor with many elements in a row, or rows of different shapes, is described by the mean, the
standard deviation, the extremes and the number of its elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from modelport.gateway.recording.recorded_calls import RecordedCall, values
from modelport.loadtests.load.payloads import Array, Tensors

#: Elements of a row that are features of their own.
MOST_ELEMENTS = 256
#: Distinct values of integers, and of texts, that are categories.
MOST_CATEGORIES = 50
INPUT, OUTPUT = "input", "output"


class FeatureName(NamedTuple):
    """The name of a feature.

    Attributes:
        side: ``INPUT`` or ``OUTPUT``.
    """

    side: str
    name: str


#: Numbers with NaN where a value is missing, or texts with None.
Columns = dict[FeatureName, Array]


class RequestRows(NamedTuple):
    """The tensors of one request: inputs and outputs; and its model, if it was recorded."""

    inputs: Tensors
    outputs: Tensors
    model: str = ""


def rows_of(call: RecordedCall) -> RequestRows:
    return RequestRows(values(call.inputs), values(call.outputs), call.model)


def columns(requests: Sequence[RequestRows]) -> Columns:
    """The features of requests, each with a value for each row."""
    found: Columns = {}
    counts = [_count(each) for each in requests]
    for side, tensors in (
        (INPUT, [each.inputs for each in requests]),
        (OUTPUT, [each.outputs for each in requests]),
    ):
        names = dict.fromkeys(name for each in tensors for name in each)
        for name in names:
            parts = [
                _by_row(each[name], count) if name in each else None
                for each, count in zip(tensors, counts, strict=True)
            ]
            for suffix, column in _features(parts, counts):
                found[FeatureName(side, name + suffix)] = column
    return found


def _count(request: RequestRows) -> int:
    """The number of rows: the first dimension that all tensors have; else one."""
    arrays = (*request.inputs.values(), *request.outputs.values())
    sizes = {each.shape[0] if each.ndim else -1 for each in arrays}
    return max(sizes) if len(sizes) == 1 and max(sizes) > 0 else 1


def _by_row(array: Array, count: int) -> Array:
    fits = array.ndim > 0 and array.shape[0] == count
    return array.reshape(count, *array.shape[1:]) if fits else array.reshape(1, *array.shape)


def _features(parts: Sequence[Array | None], counts: Sequence[int]) -> Iterable[tuple[str, Array]]:
    """The features of a tensor; a request without it has missing values."""
    known = [each for each in parts if each is not None]
    shapes = {each.shape[1:] for each in known}
    shape = next(iter(shapes))
    is_text = any(each.dtype.kind in "OSU" for each in known)
    absent = sum(count for part, count in zip(parts, counts, strict=True) if part is None)
    if len(shapes) == 1 and int(np.prod(shape)) <= MOST_ELEMENTS:
        whole = np.concatenate([each.reshape(len(each), -1) for each in known])
        for number, at in enumerate(np.ndindex(*shape)):
            suffix = f"[{','.join(map(str, at))}]" if at else ""
            yield suffix, _padded(_plain(whole[:, number], is_text), absent, is_text)
        return
    flat = [row.ravel() for each in known for row in each]
    yield " size", _padded(np.array([len(row) for row in flat], float), absent, False)
    if is_text:
        return
    described = np.array([_description(row.astype(float)) for row in flat])
    for number, word in enumerate(("mean", "std", "min", "max")):
        yield f" {word}", _padded(described[:, number], absent, False)


def _description(row: Array) -> tuple[float, ...]:
    if not row.size:
        return (np.nan,) * 4
    with np.errstate(invalid="ignore", over="ignore"):
        return tuple(float(each) for each in (row.mean(), row.std(), row.min(), row.max()))


def _plain(column: Array, is_text: bool) -> Array:
    if not is_text:
        return column.astype(float)
    made = np.empty(len(column), object)
    made[:] = [_text(each) for each in column.tolist()]
    return made


def _text(value: object) -> str | None:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text or None


def _padded(column: Array, absent: int, is_text: bool) -> Array:
    if not absent:
        return column
    filler = np.full(absent, None if is_text else np.nan, object if is_text else float)
    return np.concatenate([column, filler])


def rows_of_arrays(arrays: Mapping[str, Array], inputs: Iterable[str]) -> list[RequestRows]:
    """RequestRows by the tensors' names, as of an ``.npz``; what is no input is an output."""
    wanted = {*inputs}
    return [
        RequestRows(
            {name: each for name, each in arrays.items() if name in wanted},
            {name: each for name, each in arrays.items() if name not in wanted},
        )
    ]
