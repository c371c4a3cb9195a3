"""A long JSON array of numbers, booleans or strings, flat or rectangular, held by numpy.

Python lists would take ten times the memory of the JSON text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.runtime import offload, request_memory
from modelport.gateway.types import Array

#: Integer types tried to store integers compactly.
_NARROW = (np.int8, np.int16, np.int32)
#: Strings up to this length are interned.
SHORT = 2
#: Elements of each part that error messages look at.
HEAD = 64
_KINDS: dict[frozenset[type], str] = {
    frozenset({int}): "numbers",
    frozenset({float}): "numbers",
    frozenset({int, float}): "numbers",
    frozenset({bool}): "booleans",
    frozenset({str}): "strings",
    frozenset(): "nothing",
}


class _Part(NamedTuple):
    """Consecutive elements, as one array of ``inner`` shape each."""

    kind: str
    types: frozenset[type]
    inner: tuple[int, ...]
    array: Array


class LongArray:
    """Elements of one kind and shape, added in parts."""

    __slots__ = ("_count", "_parts", "_sizes", "types")

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._count = 0
        #: The JSON types of the values, as Python has them.
        self.types: set[type] = set()

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._count, *(self._parts[0].inner if self._parts else ()))

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self._count

    def add(self, items: Sequence[Any]) -> bool:
        """Add ``items`` if they have one kind and shape, the array's; return whether they do."""
        part = _part(items)
        if part is None:
            return False
        if self._parts:
            first = self._parts[0]
            if part.inner != first.inner or part.kind != first.kind:
                return False
        self._parts.append(part)
        self._count += len(items)
        self.types |= part.types
        return True

    def array(self, dtype: np.dtype[Any]) -> Array:
        """Convert to a numpy array of ``dtype``.

        Raises:
            OverflowError: An integer does not fit.
            MemoryExhausted: The memory budget does not allow so large an array.
        """
        request_memory.reserve(self.size * dtype.itemsize)
        found = np.empty(self.shape, dtype)
        start = 0
        for part in self._parts:
            count = len(part.array)
            if dtype.kind in "iu" and part.array.dtype.kind in "iu" and part.array.size:
                limits = np.iinfo(dtype)
                if int(part.array.min()) < limits.min or int(part.array.max()) > limits.max:
                    raise OverflowError
            with np.errstate(over="ignore"):  # values beyond FP32 become infinity, as in C
                found[start : start + count] = part.array
            start += count
            offload.checkpoint()
        return found

    def head(self) -> list[Any]:
        """Return the first elements as lists."""
        return self.tolist(HEAD)

    def tolist(self, most: int | None = None) -> list[Any]:
        """Convert to lists, with at most ``most`` elements of each part."""
        return list(itertools.chain.from_iterable(self.pieces(most)))

    def pieces(self, most: int | None = None) -> Iterator[list[Any]]:
        """Convert each part to lists, with at most ``most`` elements of it."""
        for part in self._parts:
            array: Any = part.array[:most]
            if part.kind == "strings":
                array = np.frompyfunc(bytes.decode, 1, 1)(array)
            yield array.tolist()


def _part(items: Sequence[Any]) -> _Part | None:
    """Convert ``items`` to an array; None if they differ in kind or shape."""
    if isinstance(items[0], LongArray):
        return _rows(items)
    shape, flat = [len(items)], items
    types = set(map(type, flat))
    while types == {list}:
        lengths = set(map(len, flat))
        if len(lengths) != 1:
            return None
        shape.append(lengths.pop())
        flat = list(itertools.chain.from_iterable(flat))
        types = set(map(type, flat))
    kind = _KINDS.get(frozenset(types))
    if kind is None:
        return None
    return _Part(kind, frozenset(types), tuple(shape[1:]), _packed(kind, types, flat, shape))


def _packed(kind: str, types: set[type], flat: Sequence[Any], shape: list[int]) -> Array:
    if kind == "strings":
        array = np.empty(len(flat), dtype=object)
        array[:] = [_encoded(text) for text in flat]
        return array.reshape(shape)
    if kind == "booleans":
        return np.array(flat, bool).reshape(shape)
    if types != {int}:
        return np.array(flat, np.float64).reshape(shape)
    try:
        whole: Array = np.array(flat, np.int64)
    except OverflowError:
        try:
            return np.array(flat, np.uint64).reshape(shape)
        except OverflowError:
            raise InvalidArgument(
                "an array mixes negative integers with integers above 2^63 - 1"
            ) from None
    low, high = whole.min(), whole.max()
    for narrow in _NARROW:
        limits = np.iinfo(narrow)
        if limits.min <= low and high <= limits.max:
            return whole.astype(narrow).reshape(shape)
    return whole.reshape(shape)


@lru_cache(1 << 16)
def _short(text: str) -> bytes:
    return text.encode()


def _encoded(text: str) -> bytes:
    """Encode a string; equal short strings share one object."""
    return _short(text) if len(text) <= SHORT else text.encode()


def _rows(items: Sequence[Any]) -> _Part | None:
    """Convert a list with one row, which is itself a ``LongArray``."""
    (row,) = items  # the parser adds long rows one by one
    kinds = {part.kind for part in row._parts}
    if len(kinds) != 1:
        return None
    kind = kinds.pop()
    arrays = [part.array for part in row._parts]
    return _Part(kind, frozenset(row.types), row.shape, np.concatenate(arrays)[np.newaxis])
