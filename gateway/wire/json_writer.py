"""Incremental writer of JSON documents that hold large numpy arrays.

Each piece takes at most a millisecond and ends with a ``checkpoint``. numpy joins the pieces, which
releases the interpreter lock during the copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from modelport.gateway.runtime import offload
from modelport.gateway.types import Array
from modelport.gateway.wire import json_text
from modelport.gateway.wire.raw_tensors import Buffer

#: Values in a piece.
PIECE = 16_384
#: Characters of a piece, and of a string that count for a value.
SLICE, _VALUE_LENGTH = 65_536, 16
_TEXTS = (str, bytes)
#: A copy of this size takes a fraction of a millisecond.
_COPIED_BYTES = 1 << 20


class Rows(NamedTuple):
    """An array of objects, one for each row of ``columns``, which have equal lengths."""

    columns: Mapping[str, Array]

    def listed(self, start: int = 0, stop: int | None = None) -> list[dict[str, Any]]:
        parts = [_each(column[start:stop]) for column in self.columns.values()]
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*parts, strict=True)]


def dumps(document: Any) -> Buffer:
    """Encode ``document``, whose dicts and lists may hold numpy arrays and ``Rows``.

    NaN and the infinities become bare tokens. Object arrays hold JSON values.
    """
    if _size(document) <= PIECE:
        return json_text.dumps(_plain(document))
    return join(list(parts(document)))


def join(pieces: Sequence[Buffer]) -> Buffer:
    """Concatenate ``pieces``."""
    if sum(map(len, pieces)) <= _COPIED_BYTES:
        return b"".join(pieces)
    return np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces if piece]).data


def parts(document: Any) -> Iterator[bytes]:
    """Yield the pieces of ``dumps(document)``."""
    if _size(document) <= PIECE:
        yield json_text.dumps(_plain(document))
    elif type(document) is dict:
        before = b"{"
        for key, value in document.items():
            yield b"%b%b:" % (before, json_text.dumps(key))
            yield from parts(value)
            before = b","
        yield b"}"
    elif type(document) is Rows:
        yield from _rows(document)
    elif type(document) is list:
        before = b"["
        for item in document:
            yield before
            yield from parts(item)
            before = b","
        yield b"]"
    elif document.ndim:
        yield from _array(document)
    else:
        yield from _string(document.item())


def _array(array: Array) -> Iterator[bytes]:
    width, before = max(1, _size(array) // len(array)), b"["
    step = max(1, PIECE // width)
    for start in range(0, len(array), step):
        piece = array[start : start + step]
        if _size(piece) <= PIECE:
            yield before
            yield json_text.dumps(_plain(piece))[1:-1]
            before = b","
        else:
            for index in range(len(piece)):
                yield before
                yield from parts(piece[index, ...])
                before = b","
        offload.checkpoint()
    yield b"]"


def _string(text: str) -> Iterator[bytes]:
    before = b'"'
    for start in range(0, len(text), SLICE):
        yield before + json_text.dumps(text[start : start + SLICE])[1:-1]
        before = b""
        offload.checkpoint()
    yield b'"'


def _rows(rows: Rows) -> Iterator[bytes]:
    count = len(next(iter(rows.columns.values())))
    width, before = _size(rows) // count, b"["
    step = max(1, PIECE // max(1, width))
    for start in range(0, count, step):
        yield before
        if width > PIECE:
            yield from parts({name: column[start, ...] for name, column in rows.columns.items()})
        else:
            yield json_text.dumps(rows.listed(start, start + step))[1:-1]
        before = b","
        offload.checkpoint()
    yield b"]"


def is_large(array: Array) -> bool:
    """Whether writing ``array`` takes more than a millisecond."""
    return _size(array) > PIECE


def _size(document: Any) -> int:
    """Count the values of the arrays in ``document``; long strings count for several."""
    if isinstance(document, np.ndarray):
        if document.dtype != object or document.size > PIECE:
            return document.size
        texts = (len(value) for value in document.flat if type(value) in _TEXTS)
        return document.size + sum(texts) // _VALUE_LENGTH
    if type(document) is dict:
        return sum(map(_size, document.values()))
    if type(document) is Rows:
        return sum(map(_size, document.columns.values()))
    return sum(map(_size, document)) if type(document) is list else 0


def _plain(document: Any) -> Any:
    """Convert ``document`` for ``json_text.dumps``."""
    if isinstance(document, np.ndarray):
        return document.tolist() if document.dtype == object else json_text.numbers(document)
    if type(document) is dict:
        return {key: _plain(value) for key, value in document.items()}
    if type(document) is Rows:
        return document.listed()
    return list(map(_plain, document)) if type(document) is list else document


def _each(column: Array) -> Any:
    """Split ``column`` into the values of its rows."""
    if column.dtype == object:
        return column.tolist()
    if column.dtype.kind != "f" or np.isfinite(column).all():
        return np.ascontiguousarray(column)
    return [json_text.numbers(np.asarray(row)) for row in column]
